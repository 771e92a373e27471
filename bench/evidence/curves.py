"""Show single runs that start from the pre-trained BERT: nDCG@10 of some test questions during training, and which
vector wins.

python bench/evidence/curves.py --data=FOLDER --workdir=runs/curves          all runs of RUNS, one after the other
python bench/evidence/curves.py --data=FOLDER --workdir=runs/curves mvr      only the named ones

One seed each. FOLDER is that of bench/evidence/run.py, and so are the settings, except the keys in RUNS. After a kill,
the same command resumes the run.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.evidence.claims import COMMON, CONTRASTIVE, NEW_LAYERS, PAPER_SIZES, from_bert, layers
from bench.evidence.steps import make_data, missing_data
from jaxret.experiments.vector_diversity import JudgedSource, judged_pairs, read_judged_texts
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import atomic_write
from jaxret.training.loop import train

QUESTIONS = 1500  # questions of the test split, in the split "curve"
MVR = {"head.mvr.count": 4, "loss.local_weight": 0.01}
LONG = {"train.steps": 1600, "train.checkpoint_every": 200}  # forty epochs
SHORT = {"train.steps": 240, "train.checkpoint_every": 40}  # six epochs, like the rows of the table
NO_HEAD = {"head.aggretriever.mlm": False}
UNPRUNED = {"head.aggretriever.lexical_dim": 30522}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dual": ("dual_encoder", from_bert(**LONG)),
    "mlr": ("dual_encoder", from_bert(**{**layers(1, 2, **CONTRASTIVE), "loss.local_weight": 1.0, **LONG})),
    "mvr": ("mvr", from_bert(**MVR, **LONG, **{"loss.annealing_rate": 0.1})),
    "mvr-0.2": ("mvr", from_bert(**MVR, **SHORT, **{"loss.annealing_rate": 0.2, "head.mvr.deviation": 0.2})),
    "mvr-0.02": ("mvr", from_bert(**MVR, **SHORT, **{"loss.annealing_rate": 0.2, "head.mvr.deviation": 0.02})),
    "i3": ("i3", from_bert(**NEW_LAYERS, **SHORT)),
    "agg": ("aggretriever", from_bert(**PAPER_SIZES, **SHORT)),
    "agg-no-head": ("aggretriever", from_bert(**PAPER_SIZES, **SHORT, **NO_HEAD)),
    # All words of the vocabulary are kept.
    "agg-unpruned": ("aggretriever", from_bert(**{**PAPER_SIZES, **UNPRUNED}, **SHORT)),
    "agg-no-head-unpruned": ("aggretriever", from_bert(**{**PAPER_SIZES, **UNPRUNED}, **SHORT, **NO_HEAD)),
}


def choose_questions(questions: Path) -> None:
    """Write the judgements of some test questions as a new split."""
    lines = (questions / "qrels" / "test.tsv").read_text().splitlines()
    chosen = [lines[0], *random.Random(0).sample(lines[1:], QUESTIONS)]
    with atomic_write(questions / "qrels" / "curve.tsv") as file:
        file.write("\n".join(chosen) + "\n")


def train_run(name: str, folder: Path) -> Workdir:
    """Train a run of RUNS, unless it has been trained, and return its folder."""
    from jaxret.configs.minilm import get_config

    system, keys = RUNS[name]
    questions = str(folder / "data" / "questions")
    config = get_config(system).lock()
    config.update_from_flattened_dict(
        {
            "data.train": questions,
            "data.store": str(folder / "tokens"),
            "data.dev": questions,
            "data.dev_split": "curve",
            "validation.corpus": questions,
            "validation.metric": "nDCG@10",
            "validation.batch_size": 128,
            "validation.best": "last",
            **{f"seed.{key}": 1 for key in config.seed},
            **COMMON,
            **keys,
        }
    )
    train(config, folder / name, progress=False).require_finished()
    return Workdir(folder / name)


def print_curve(name: str, workdir: Workdir) -> None:
    from jaxret.experiments.pictures.run_pictures import read_metrics

    key = "validation/nDCG@10"
    points = [f"{line['step']}: {line[key]:.4f}" for line in read_metrics(workdir) if key in line]
    print(f"{name}: nDCG@10 by step: {', '.join(points)}", flush=True)


def print_vectors(name: str, workdir: Workdir, questions: str) -> None:
    """Print which vector of the relevant passage has the best score, and how similar these vectors are; print nothing
    if a passage has one vector."""
    run = open_run(workdir.path)
    if run.model.vectors_per_passage == 1:
        return
    pairs = judged_pairs(run, read_judged_texts(JudgedSource.open(questions, "curve")))
    vectors = np.asarray(pairs.passages, float)
    scores = np.einsum("pd,pvd->pv", np.asarray(pairs.queries, float), vectors)
    wins = np.bincount(scores.argmax(axis=1), minlength=scores.shape[1]) / len(scores)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines = np.einsum("pvd,pwd->vw", vectors / lengths, vectors / lengths) / len(vectors)
    apart = cosines[np.triu_indices(len(cosines), 1)]
    print(f"{name}: wins {wins.round(3)}, mean scores {scores.mean(axis=0).round(1)}")
    print(f"{name}: lengths {lengths.mean(axis=0)[:, 0].round(1)}, cosines {apart.min():.4f} to {apart.max():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}; default: all")
    arguments = parser.parse_args()
    if wrong := [name for name in arguments.names if name not in RUNS]:
        parser.error(f"{wrong[0]} is not a run; they are {', '.join(RUNS)}")
    if problem := missing_data(arguments.data):
        parser.error(problem)
    folder = arguments.workdir.resolve()
    make_data(arguments.data.resolve(), folder / "data")
    choose_questions(folder / "data" / "questions")
    for name in arguments.names or RUNS:
        workdir = train_run(name, folder)
        print_curve(name, workdir)
        print_vectors(name, workdir, str(folder / "data" / "questions"))


if __name__ == "__main__":
    main()
