"""Run a step of `bench/evidence/run.py`: its folder, its inputs, and its code."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.evidence.claims import (
    CLAIMS,
    COMMON,
    LAST_WINS,
    PERPLEXITY,
    STEPS,
    VARIATION,
    Keywords,
    Mine,
    Pretrain,
    Train,
)
from jaxret.evaluation.comparison import MeasureValues
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.storage.atomic import atomic_write, sha256_json, write_json
from jaxret.storage.transaction import new_folder

SOURCES = ("squadshifts-wiki", "squadshifts-amazon")  # data sets with questions and passages
TEXTS = (*(f"{name}/corpus.jsonl" for name in SOURCES), "nq-qed/psgs.tsv", "medquad", "debian-packages")
MEASURES = ("nDCG@10", "RR@10", "R@100")  # every run has the means of these


def missing_data(source: Path) -> str:
    """Return a sentence if the folder lacks a data set; "" if it has all."""
    absent = [name for name in (*SOURCES, *TEXTS) if not (source / name).exists()]
    return f"--data={source} has no {absent[0]}; docs/evidence.md says what it holds" if absent else ""


def make_data(source: Path, folder: Path) -> None:
    """Write `questions`: both data sets in one BEIR folder. The smaller splits are for training, because few steps read
    few questions; the largest is for measuring, because small differences need many. Also write `texts`, a corpus for
    pre-training."""
    from jaxret.data.formats import Corpus

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
            for number, passage in enumerate(
                itertools.chain.from_iterable(Corpus.open(source / t).read() for t in TEXTS)
            ):
                file.write(json.dumps({"_id": str(number), "title": passage.title, "text": passage.text}) + "\n")


def copy_encoder(folder: Path) -> None:
    """Copy MiniLM without sentence-transformers' settings, which would decide head.token and normalize."""
    from jaxret.configs.minilm import get_config
    from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
    from jaxret.models.encoders.pretrained import resolve_encoder

    if folder.exists():
        return
    source = resolve_encoder(get_config().encoder.checkpoint)
    with new_folder(folder) as made:
        for name in ("config.json", "model.safetensors", *TOKENIZER_FILES):
            if (source / name).exists():
                shutil.copyfile(source / name, made / name)


@dataclass(frozen=True)
class Work:
    """The folders of steps. A folder's name has a digest of all inputs of the step, so a changed step has another
    folder."""

    folder: Path
    data: str  # digest of the data
    values: Path  # measured values, one file per run, which remain if the folder is deleted
    answers: Mapping[str, str]  # test question -> the passage that answers it

    @property
    def questions(self) -> str:
        return str(self.folder / "data" / "questions")

    def path(self, name: str, seed: int) -> Path:
        return self.folder / "steps" / f"{name}.{seed if STEPS[name].seeded else 'all'}.{digest(name, self.data)}"

    def result(self, name: str, seed: int) -> Path:
        """Return the file that is written last: a step with it is complete, and others can read from its folder."""
        return self.path(name, seed) / "done.json"

    def measured(self, name: str, seed: int) -> Path:
        return self.values / f"{self.path(name, seed).name}.npz"

    def resolve_paths(self, keys: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return config keys, with "@NAME/FILE" replaced by the path of that file of another step."""
        return {
            key: str(self.path(value[1:].partition("/")[0], seed) / value.partition("/")[2])
            if isinstance(value, str) and value.startswith("@")
            else value
            for key, value in keys.items()
        }


def needs(name: str) -> list[str]:
    """Return the steps from which a step reads."""
    step = STEPS[name]
    if isinstance(step, Keywords):
        return []
    values = [step.pool] if isinstance(step, Mine) else list(step.keys.values())
    return [value[1:].partition("/")[0] for value in values if isinstance(value, str) and value.startswith("@")]


@cache
def digest(name: str, data: str) -> str:
    step = STEPS[name]
    common = COMMON if isinstance(step, Train) else {}
    made_from = [type(step).__name__, asdict(step), common, [digest(one, data) for one in needs(name)], data]
    return sha256_json(json.loads(json.dumps(made_from)))[:8]


def make(work: Work, name: str, seed: int) -> None:
    begin, used = time.time(), time.process_time()
    step, folder = STEPS[name], work.path(name, seed)
    measured: MeasureValues = {}
    if isinstance(step, Train):
        measured = train_and_measure(work, name, step, seed)
    elif isinstance(step, Mine):
        mine(work, step, seed, folder)
    elif isinstance(step, Keywords):
        write_pairs(work, step, folder)
    else:
        pretrain_encoder(work, step, folder)
    cost = {"seconds": round(time.time() - begin), "processor_seconds": round(time.process_time() - used)}
    if isinstance(step, Train):
        write_values(work.measured(name, seed), name, measured, cost["processor_seconds"])
    write_json(work.result(name, seed), cost)
    if isinstance(step, Train) and not any(name in needs(other) for other in STEPS):
        shutil.rmtree(folder / "checkpoints")  # 200 MB
        shutil.rmtree(folder / "embeddings")


def train_and_measure(work: Work, name: str, step: Train, seed: int) -> MeasureValues:
    """Train, encode and search; return measure -> question id -> value."""
    from jaxret.configs.minilm import get_config
    from jaxret.data.formats import Corpus
    from jaxret.experiments.searches.search_files import search_files
    from jaxret.index.encoding.encode import encode_corpus
    from jaxret.runs.run import open_run
    from jaxret.training.loop import train

    config = get_config(step.system).lock()
    seeds = {f"seed.{key}": seed for key in config.seed}
    places = {
        "data.train": work.questions,
        "data.store": str(work.folder / "tokens"),
        "encoder.checkpoint": str(work.folder / "minilm"),
    }
    config.update_from_flattened_dict({**places, **seeds, **COMMON, **work.resolve_paths(step.keys, seed)})
    folder = work.path(name, seed)
    train(config, folder, progress=False).require_finished()
    run = open_run(folder)
    encode_corpus(run, Corpus.open(work.questions), progress=False)
    evaluation = search_files(
        run,
        EvaluationSource.open(work.questions, work.questions),
        EvaluationOptions(k=100, measures=tuple(MEASURES)),
        progress=False,
    )
    assert evaluation is not None  # because the questions have judgements
    measures = {claim.measure for claim in CLAIMS if name in (claim.baseline, claim.treated)}
    return {**evaluation.per_query, **(several_vectors(run, work.questions) if measures - set(MEASURES) else {})}


def write_values(path: Path, name: str, measured: MeasureValues, processor_seconds: int) -> None:
    """Write a few kilobytes: the means of MEASURES, and the values that claims compare, by sorted ids, with the digest
    of these."""
    arrays: dict[str, Any] = {f"mean {one}": np.mean(list(measured[one].values())) for one in MEASURES}
    for one in {claim.measure for claim in CLAIMS if name in (claim.baseline, claim.treated)}:
        ids = sorted(measured[one])
        arrays[one] = np.array([measured[one][key] for key in ids], np.float32)
        arrays[f"ids of {one}"] = np.array(sha256_json(ids))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as file:
        np.savez_compressed(file, processor_seconds=np.array(processor_seconds), **arrays)


def read_values(path: Path, measure: str) -> tuple[str, np.ndarray]:
    """Return the digest of the sorted ids, and their values."""
    with np.load(path, allow_pickle=False) as arrays:
        return str(arrays[f"ids of {measure}"]), arrays[measure]


def passages_of(work: Work, measure: str, ids: str, count: int) -> list[str]:
    """Return the passages of `count` values whose sorted ids have the digest `ids`. Raises ValueError if these are not
    the test questions."""
    if measure == PERPLEXITY:  # its values belong to passages
        return [f"{number:09}" for number in range(count)]
    questions = sorted(work.answers)
    if sha256_json(questions) != ids:
        raise ValueError(f"{measure} was measured on other questions than the {len(questions):,} of {work.questions}")
    return [work.answers[one] for one in questions]


def several_vectors(run: Any, data: str) -> MeasureValues:
    """Return, from a passage's vectors before pooling, whether the first (the last layer's) wins, and MVR's two
    measures (section 5.2) as in jaxret/evaluation/diversity.py, for each question or passage."""
    from jaxret.evaluation.diversity import normalized_scores, perplexity
    from jaxret.experiments.vector_diversity import JudgedSource, judged_pairs, read_judged_texts

    pairs = judged_pairs(run, read_judged_texts(JudgedSource.open(data, "test")))
    scores = normalized_scores(pairs.queries, pairs.passages, "cosine")
    winners, best = winning(scores), scores.max(axis=1)
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


def winning(scores: np.ndarray) -> np.ndarray:
    """Return which vector wins for cosines [P,V]; the first of those that are equal except for rounding."""
    from jaxret.evaluation.diversity import EQUAL

    return (scores > scores.max(axis=1, keepdims=True) - EQUAL).argmax(axis=1)


def mine(work: Work, step: Mine, seed: int, folder: Path) -> None:
    from jaxret.data.formats import Corpus, TrainingSource
    from jaxret.mining.mining_job import MiningJob, mine_negatives
    from jaxret.mining.mining_settings import MiningSettings

    pool = work.resolve_paths({"pool": step.pool}, seed)["pool"]
    settings = MiningSettings(depth=50, keep=20, seed=seed if step.seeded else 0)
    folder.mkdir(parents=True, exist_ok=True)
    data, corpus = TrainingSource.open(work.questions, "train"), Corpus.open(work.questions)
    job = MiningJob(data, (pool,), str(folder / "mined.jsonl"), corpus=corpus, settings=settings)
    mine_negatives(job)


def write_pairs(work: Work, step: Keywords, folder: Path) -> None:
    """Write the corpus, and keywords of each passage as a query that it answers."""
    from jaxret.data.formats import Corpus
    from jaxret.mining.keywords import write_keywords

    pairs = folder / "pairs"
    (pairs / "qrels").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(work.questions) / "corpus.jsonl", pairs / "corpus.jsonl")
    write_keywords(Corpus.open(work.questions), pairs / "queries.jsonl", step.count)
    ids = [json.loads(line)["_id"] for line in (pairs / "queries.jsonl").read_text().splitlines()]
    rows = ["query-id\tcorpus-id\tscore", *(f"{one}\t{one}\t1" for one in ids)]
    (pairs / "qrels" / "train.tsv").write_text("\n".join(rows) + "\n")


def pretrain_encoder(work: Work, step: Pretrain, folder: Path) -> None:
    from jaxret.configs.pretraining.mlm import get_config
    from jaxret.training.pretraining.pretrain import pretrain

    config = get_config().lock()
    fixed = {"data.train": str(work.folder / "data" / "texts"), "data.store": str(work.folder / "tokens")}
    config.update_from_flattened_dict({**fixed, "pretraining.method": step.method, **step.keys})
    pretrain(config, folder).require_finished()
