"""The whole job on text that is already on the machine: the documentation of the Python that runs it.

Trains on (summary sentence -> rest of the docstring) pairs, searches all docstrings with questions written by hand, and
compares BM25, the encoder as it comes, a fine-tuned dual encoder and a fine-tuned multi-layer retriever.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.formats import read_run, write_beir
from jaxret.data.records import Judgement, Passage, Query
from jaxret.demo.python_docs import Pair, load_questions, read_docstrings, training_pairs
from jaxret.evaluation.bm25 import BM25
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.report import to_markdown, to_text, write_evaluation
from jaxret.shipped import load
from jaxret.storage import atomic_write
from jaxret.tools.experiment import MEASURES, run_system
from jaxret.tools.search_files import print_ranking

SYSTEMS = {  # family of configs/demo.py -> row of the table
    "as_it_comes": "MiniLM as it comes",
    "dual_encoder": "dual encoder, fine-tuned",
    "mlr": "MLR {4,6}, fine-tuned",
}
SHOWN = 5  # questions whose answers are printed


@dataclass(frozen=True)
class DemoData:
    """The files written and what is in them."""

    corpus: Path  # BEIR folder: every docstring, the questions, qrels/test.tsv
    pairs: Path  # BEIR folder: training and dev pairs
    passages: list[Passage]
    questions: list[Query]
    judgements: list[Judgement]


def demo(workdir: str | Path, overrides: Mapping[str, Any] | None = None, max_passages: int | None = None) -> Path:
    """Runs everything in `workdir` and returns the path of the table; run again, it continues where it stopped.

    overrides: config keys to set ({"train.steps": 2}); max_passages: a smaller corpus (the judged passages and the
    first others). Both are for trying it out.
    """
    begin = time.perf_counter()
    workdir = Path(workdir)
    data = write_data(workdir / "data", max_passages)
    table: dict[str, Evaluation] = {"BM25": evaluate_bm25(data, workdir)}
    for family, title in SYSTEMS.items():
        print(f"\n== {title}")
        config = demo_config(family, data.pairs, overrides or {})
        table[title] = run_system(config, workdir / family, data.corpus, "test", MEASURES)
    print_results(workdir, data, table)
    print(f"\n{time.perf_counter() - begin:.0f} seconds in all.")
    return workdir / "results.md"


def demo_config(family: str, pairs: Path, overrides: Mapping[str, Any]) -> ConfigDict:
    """configs/demo.py with the data's place filled in."""
    config = load(f"demo:{family}")
    untrained = {"train.steps": 0} if family == "as_it_comes" else {}
    config.update_from_flattened_dict({"data.train": str(pairs), "data.dev": str(pairs), **overrides, **untrained})
    return config


def write_data(folder: Path, max_passages: int | None = None) -> DemoData:
    """Reads this Python's docstrings and writes the two BEIR folders."""
    print(f"Reading the documentation of Python {platform.python_version()} ...")
    passages = read_docstrings(progress=True)
    questions, judgements, skipped = load_questions({p.id for p in passages})
    train_pairs, dev_pairs = training_pairs(passages)
    if max_passages:
        judged = {j.passage_id for j in judgements}
        kept = [p for p in passages if p.id in judged]
        kept += [p for p in passages if p.id not in judged][: max(max_passages - len(kept), 0)]
        passages = sorted(kept, key=lambda p: p.id)
        train_pairs, dev_pairs = train_pairs[:max_passages], dev_pairs[: max_passages // 4]
    write_beir(folder / "python-docs", passages, questions, {"test": judgements})
    pairs = [*train_pairs, *dev_pairs]
    write_beir(
        folder / "pairs",
        [pair.passage for pair in pairs],
        [pair.query for pair in pairs],
        {"train": _judgements(train_pairs), "dev": _judgements(dev_pairs)},
    )
    print(f"{len(passages):,} docstrings, {len(train_pairs):,} training and {len(dev_pairs):,} dev pairs,", end=" ")
    print(f"{len(questions)} questions ({len(skipped)} skipped: this Python lacks their answers)")
    for line in skipped:
        print(f"  {line}")
    return DemoData(folder / "python-docs", folder / "pairs", passages, questions, judgements)


def _judgements(pairs: Iterable[Pair]) -> list[Judgement]:
    return [Judgement(pair.query.id, pair.passage.id, 1) for pair in pairs]


def evaluate_bm25(data: DemoData, workdir: Path) -> Evaluation:
    """The word-matching baseline on the same passages, questions and judgements."""
    ranking = BM25(data.passages, progress=True).search(data.questions, k=100, progress=True)
    evaluation = evaluate(ranking, data.judgements, MEASURES)
    write_evaluation(workdir / "bm25.json", evaluation, {"system": "BM25", "k1": 0.9, "b": 0.4, "k": 100})
    return evaluation


def print_results(workdir: Path, data: DemoData, table: Mapping[str, Evaluation]) -> None:
    """The table, a few answers, where things are, and what to do next."""
    with atomic_write(workdir / "results.md") as file:
        file.write(to_markdown(table) + "\n")
    print(f"\nQuestions about Python, {len(data.passages):,} docstrings to choose from:\n")
    print(to_text(table))
    best = workdir / "mlr"
    print("\nThe first three passages of the fine-tuned MLR:")
    show_answers(best, data, data.questions[:: max(len(data.questions) // SHOWN, 1)][:SHOWN])
    print(f"""
Saved in {workdir}: the data (data/), and for each system its config, checkpoints, vectors, run file and evaluation
({", ".join(SYSTEMS)}); the table is in {workdir / "results.md"}.

Ask it something (after `make demo`: source .venv/bin/activate):
  jaxret search --workdir={best} --query="how do I sort a list of dictionaries by a key?"

The same on your own data, in any format of docs/data.md:
  jaxret train  --config=minilm:mlr --workdir=runs/mine --config.data.train=FOLDER_OR_FILE
  jaxret encode --workdir=runs/mine --corpus=FOLDER_OR_FILE
  jaxret search --workdir=runs/mine --queries=FILE --qrels=FILE --k=100""")


def show_answers(run_folder: Path, data: DemoData, questions: Sequence[Query]) -> None:
    """Prints the top three from the run file that the search wrote."""
    (path,) = (run_folder / "runs").glob("*.trec")
    ranking = read_run(path)
    by_id = {passage.id: passage for passage in data.passages}
    for question in questions:
        print(f"\n{question.text}")
        print_ranking(ranking[question.id][:3], by_id)
