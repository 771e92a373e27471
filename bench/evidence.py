"""What the papers claim, tried on real questions by small models: one command, which may be killed at any time.

python bench/evidence.py --data=FOLDER --workdir=runs/evidence     works, or goes on; results: bench/evidence.json
python bench/evidence.py --table                                   the table of docs/evidence.md, from there

FOLDER has the sets of SOURCES and TEXTS. What is trained, and which claims are tried, is in bench/evidence_claims.py:
every claim with the first seed, then with the second, and so on; a run that several claims need is made once. Each step
is a process and a folder of its own. One that fails is told, has a log, and is tried again when the command is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.evidence_claims import CLAIMS, COMMON, LAST_WINS, PERPLEXITY, STEPS, VARIATION, Claim, Mine, Pretrain, Train
from bench.evidence_table import Values, judged, row_of, to_markdown
from jaxret.lockfile import LOCK, LockFile
from jaxret.storage import read_json, sha256_file, sha256_json, write_json
from jaxret.tools.transaction import new_folder

SOURCES = ("squadshifts-wiki", "squadshifts-amazon")  # questions and passages
TEXTS = (*(f"{name}/corpus.jsonl" for name in SOURCES), "nq-qed/psgs.tsv", "medquad", "debian-packages")
MEASURES = ("nDCG@10", "RR@10", "R@100")
RESULTS = Path(__file__).with_name("evidence.json")


def make_data(source: Path, folder: Path) -> None:
    """`questions`: both sets in one BEIR folder, the smaller splits to train on, the largest to measure: few steps read
    few questions, and small differences need many. `texts`: a corpus to pre-train on."""
    from jaxret.data.formats import read_corpus

    if folder.exists():
        return
    with new_folder(folder) as made:
        (made / "questions" / "qrels").mkdir(parents=True)
        (made / "texts").mkdir()
        for name in ("corpus.jsonl", "queries.jsonl"):
            (made / "questions" / name).write_text("".join((source / one / name).read_text() for one in SOURCES))
        for split, parts in {"train": ("dev", "test"), "test": ("train",)}.items():
            files = [(source / one / "qrels" / f"{part}.tsv").read_text() for one in SOURCES for part in parts]
            lines = [files[0].splitlines()[0], *(line for text in files for line in text.splitlines()[1:])]
            (made / "questions" / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
        with (made / "texts" / "corpus.jsonl").open("w") as file:
            for number, passage in enumerate(itertools.chain.from_iterable(read_corpus(source / t) for t in TEXTS)):
                file.write(json.dumps({"_id": str(number), "title": passage.title, "text": passage.text}) + "\n")


def copy_encoder(folder: Path) -> None:
    """MiniLM without what sentence-transformers says of its vectors, which would decide head.token and normalize."""
    from configs.minilm import get_config
    from jaxret.data.tokenizer import TOKENIZER_FILES
    from jaxret.models.encoders.pretrained import resolve

    if folder.exists():
        return
    source = resolve(get_config().encoder.checkpoint)
    with new_folder(folder) as made:
        for name in ("config.json", "model.safetensors", *TOKENIZER_FILES):
            if (source / name).exists():
                shutil.copyfile(source / name, made / name)


@dataclass(frozen=True)
class Work:
    """Where steps are. A folder's name has a digest of all that the step is made of: what has changed is another."""

    folder: Path
    data: str  # digest of the data

    @property
    def questions(self) -> str:
        return str(self.folder / "data" / "questions")

    def path(self, name: str, seed: int) -> Path:
        return self.folder / "steps" / f"{name}.{seed if STEPS[name].seeded else 'all'}.{digest(name, self.data)}"

    def result(self, name: str, seed: int) -> Path:
        """Written last of all: a step with it is done."""
        return self.path(name, seed) / "done.json"

    def is_done(self, name: str, seed: int) -> bool:
        return self.result(name, seed).exists()

    def given(self, keys: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Keys, with the paths that "@NAME/FILE" stands for."""
        return {
            key: str(self.path(value[1:].partition("/")[0], seed) / value.partition("/")[2])
            if isinstance(value, str) and value.startswith("@")
            else value
            for key, value in keys.items()
        }


def needs(name: str) -> list[str]:
    """The steps that one reads from."""
    step = STEPS[name]
    values = [step.pool] if isinstance(step, Mine) else list(step.keys.values())
    return [value[1:].partition("/")[0] for value in values if isinstance(value, str) and value.startswith("@")]


@cache
def digest(name: str, data: str) -> str:
    step = STEPS[name]
    common = COMMON if isinstance(step, Train) else {}
    made_from = [type(step).__name__, asdict(step), common, [digest(one, data) for one in needs(name)], data]
    return sha256_json(json.loads(json.dumps(made_from)))[:8]


# A step, in a process of its own


def make(work: Work, name: str, seed: int) -> None:
    begin, used = time.time(), time.process_time()
    step, folder = STEPS[name], work.path(name, seed)
    measured: dict[str, Any] = {}
    if isinstance(step, Train):
        measured = train_and_measure(work, name, step, seed)
    elif isinstance(step, Mine):
        mine_negatives(work, step, seed, folder)
    else:
        pretrain_encoder(work, step, folder)
    cost = {"seconds": round(time.time() - begin), "processor_seconds": round(time.process_time() - used)}
    write_json(work.result(name, seed), {"values": measured, **cost})
    if isinstance(step, Train) and not any(name in needs(other) for other in STEPS):
        shutil.rmtree(folder / "checkpoints")  # 200 MB
        shutil.rmtree(folder / "embeddings")


def train_and_measure(work: Work, name: str, step: Train, seed: int) -> Values:
    """What of every question is measured: measure -> id -> value."""
    from configs.minilm import get_config
    from jaxret.retrieval.encode import encode_corpus
    from jaxret.runs.run import open_run
    from jaxret.tools.search_files import search_files
    from jaxret.training.loop import train

    config = get_config(step.system).lock()
    seeds = {f"seed.{key}": seed for key in config.seed}
    places = {
        "data.train": work.questions,
        "data.store": str(work.folder / "tokens"),
        "encoder.checkpoint": str(work.folder / "minilm"),
    }
    config.update_from_flattened_dict({**places, **seeds, **COMMON, **work.given(step.keys, seed)})
    folder = work.path(name, seed)
    train(config, folder, progress=False).require_finished()
    run = open_run(folder)
    encode_corpus(run, work.questions, progress=False)
    found = search_files(run, work.questions, work.questions, "test", 100, MEASURES, progress=False)
    assert found is not None  # there are judgements
    wanted = {claim.measure for claim in CLAIMS if name in (claim.baseline, claim.treated)}
    return {**found.per_query, **(several_vectors(run, work.questions) if wanted - set(MEASURES) else {})}


def several_vectors(run: Any, data: str) -> Values:
    """Of a passage's vectors before pooling: whether the first (the last layer's) wins, and MVR's two measures (section
    5.2), as jaxret/evaluation/diversity.py has them, for each question, or passage."""
    import numpy as np

    from jaxret.evaluation.diversity import normed, perplexity
    from jaxret.tools.diversity import judged_pairs

    pairs = judged_pairs(run, data, "test", progress=False)
    scores = normed(pairs.queries, pairs.passages, "cosine")
    winners, best = scores.argmax(axis=1), scores.max(axis=1)
    varied = best - (scores.sum(axis=1) - best) / (scores.shape[1] - 1)
    chosen = {one: winners[pairs.rows == one] for one in np.unique(pairs.rows)}
    names = dict(zip(pairs.rows.tolist(), pairs.passage_ids, strict=True))
    return {
        LAST_WINS: dict(zip(pairs.query_ids, (winners == 0).astype(float).tolist(), strict=True)),
        VARIATION: dict(zip(pairs.query_ids, varied.tolist(), strict=True)),
        PERPLEXITY: {
            names[one]: value
            for one, won in chosen.items()
            if (value := perplexity(won, np.zeros(len(won)))[0]) is not None
        },
    }


def mine_negatives(work: Work, step: Mine, seed: int, folder: Path) -> None:
    from jaxret.mining.filters import Settings
    from jaxret.mining.mine import Job, mine

    pool = work.given({"pool": step.pool}, seed)["pool"]
    settings = Settings(depth=50, keep=20, seed=seed if step.seeded else 0)
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(work.questions, (pool,), str(folder / "mined.jsonl"), corpus=work.questions, settings=settings)
    mine(job, progress=False)


def pretrain_encoder(work: Work, step: Pretrain, folder: Path) -> None:
    from configs.pretraining.mlm import get_config
    from jaxret.tools.pretrain import pretrain

    config = get_config().lock()
    fixed = {"data.train": str(work.folder / "data" / "texts"), "data.store": str(work.folder / "tokens")}
    config.update_from_flattened_dict({**fixed, "pretraining.method": step.method, **step.keys})
    pretrain(config, folder, progress=False).require_finished()


# All of them


def order(claims: Sequence[Claim], seeds: int) -> Iterator[tuple[int, Claim]]:
    """(seed, claim): every claim with the first seed, in their order, then with the second; one that comes later begins
    when others have had so many."""
    for turn in range(1, seeds + max(claim.later for claim in claims) + 1):
        for claim in claims:
            if 1 <= turn - claim.later <= seeds:
                yield turn - claim.later, claim


def attempt(work: Work, name: str, seed: int, failed: dict[str, str], command: Sequence[str]) -> bool:
    """Whether a step is done, which is done now, after those that it needs, unless it was or has just failed."""
    if work.is_done(name, seed):
        return True
    path = work.path(name, seed)
    if path.name in failed:
        return False
    if not all([attempt(work, one, seed, failed, command) for one in needs(name)]):
        failed[path.name] = "a step that it needs failed"
        return False
    log = work.folder / "logs" / f"{path.name}.log"
    log.parent.mkdir(exist_ok=True)
    print(f"{time.strftime('%F %T')} {path.name}", flush=True)
    with log.open("a") as file:
        status = subprocess.run([*command, name, str(seed)], stdout=file, stderr=file, env=environment(work)).returncode
    if work.is_done(name, seed):
        return True
    told = log.read_text(errors="replace").strip().splitlines()
    failed[path.name] = f"status {status}: {told[-1][:300] if told else 'nothing was said'}"
    print(f"{path.name} failed, {failed[path.name]}; all of it: {log}", flush=True)
    return False


def environment(work: Work) -> dict[str, str]:
    """What was compiled is kept; the math library takes no second core; huge pages, as in the Makefile."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(work.folder / "compiled"),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    return {**settings, **os.environ}


def collect(work: Work, seeds: int, failed: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """What bench/evidence.json holds: a row for each claim, from the seeds that both its settings have; the means of
    every run. before: the same as it was; rows with no new run are taken from there."""
    old = {(row["baseline"], row["treated"], row["measure"]): row for row in before.get("rows", [])}
    rows, runs = [], {}
    for claim in CLAIMS:
        names = claim.baseline, claim.treated
        there = [seed for seed in range(1, seeds + 1) if all(work.is_done(name, seed) for name in names)]
        made_from = [work.path(name, seed).name for seed in there for name in names]
        known = old.get((*names, claim.measure), {})
        if known.get("runs") != made_from:
            found = {seed: [read_json(work.result(name, seed))["values"] for name in names] for seed in there}
            values = {seed: [one[claim.measure] for one in pair] for seed, pair in found.items()}
            known = row_of(claim, values, made_from)
        rows.append({**known, "paper": claim.paper, "claim": claim.says})
    for name, seed in itertools.product([n for n, s in STEPS.items() if isinstance(s, Train)], range(1, seeds + 1)):
        path = work.path(name, seed).name
        if path in before.get("runs", {}):
            runs[path] = before["runs"][path]
        elif work.is_done(name, seed):
            done = read_json(work.result(name, seed))
            means = {m: round(sum(done["values"][m].values()) / len(done["values"][m]), 5) for m in MEASURES}
            runs[path] = {**means, "processor_seconds": done["processor_seconds"]}
    return {"data": work.data, "common": COMMON, "rows": judged(rows), "runs": runs, "failed": dict(failed)}


def work_through(work: Work, seeds: int, results: Path, command: Sequence[str]) -> None:
    failed: dict[str, str] = {}
    for seed, claim in order(CLAIMS, seeds):
        for name in (claim.baseline, claim.treated):
            attempt(work, name, seed, failed, command)
            before = read_json(results) if results.exists() else {}
            found = json.loads(json.dumps(collect(work, seeds, failed, before)))
            if found != before:
                write_json(results, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(SOURCES)}, nq-qed, medquad, debian-packages")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of --results, and do nothing else")
    parser.add_argument("--step", nargs=2, metavar=("NAME", "SEED"), help="make one step, here")
    arguments = parser.parse_args()
    if arguments.table:
        print(to_markdown(read_json(arguments.results), CLAIMS))
        return
    if not arguments.data or not arguments.workdir:
        parser.error("--data and --workdir are needed")
    folder = arguments.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_data(arguments.data.resolve(), folder / "data")
    copy_encoder(folder / "minilm")
    files = sorted(path for path in (folder / "data").rglob("*") if path.is_file())
    work = Work(folder, sha256_json([sha256_file(path) for path in files]))
    if arguments.step:
        make(work, arguments.step[0], int(arguments.step[1]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the step too
    command = [sys.executable, __file__, f"--data={arguments.data}", f"--workdir={folder}", "--step"]
    lock = LockFile(folder / LOCK, "working through claims")
    try:
        work_through(work, arguments.seeds, arguments.results, command)
    finally:
        lock.release()
    print(to_markdown(read_json(arguments.results), CLAIMS))


if __name__ == "__main__":
    main()
