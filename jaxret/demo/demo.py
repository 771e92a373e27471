"""The whole job on text that is already on the machine: the documentation of the Python that runs it.

Trains on (summary sentence -> rest of the docstring) pairs, searches all docstrings with questions written by hand, and
compares BM25, the first layers of MiniLM as they come, what training makes of them as a dual encoder and as a
multi-layer retriever, and all of MiniLM as it comes: each row with the one above it, by a paired test.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.formats import read_run, write_beir
from jaxret.data.records import Judgement, Passage, Query
from jaxret.demo.python_docs import Pair, load_questions, read_docstrings, training_pairs
from jaxret.evaluation.bm25 import BM25
from jaxret.evaluation.comparison import told_p
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.report import to_markdown, to_text, write_evaluation
from jaxret.evaluation.significance import compare, holm
from jaxret.evaluation.table import Row, aligned, piped
from jaxret.runs.workdir import Workdir
from jaxret.shipped import load
from jaxret.storage import atomic_write
from jaxret.tools.asked import result_name
from jaxret.tools.experiment import MEASURES, run_system
from jaxret.tools.search_files import print_ranking


@dataclass(frozen=True)
class System:
    """A row of the table. config: the suffix of configs/demo.py; change: what is other than in the row above, {steps}
    and {pairs} (of a batch) as trained."""

    config: str
    title: str
    change: str


SYSTEMS = (
    System("first_layers", "MiniLM's layers 1-5, untrained", "vectors, not words, from layers not tuned for it"),
    System("dual_encoder", "dual encoder from these", "training: {steps} steps of {pairs} pairs"),
    System("mlr", "MLR {4,5} from these", "as many steps; a passage's layers 4 and 5, not 5 alone"),
    System("as_it_comes", "MiniLM's 6 layers, untrained", "its makers' training on a billion pairs, none here"),
)
MEASURE = "nDCG@10"  # by which a row is compared with the one above
LEVEL = 0.05  # p-values below it are called significant
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
    changes: list[str] = []
    for system in SYSTEMS:
        print(f"\n== {system.title}")
        config = demo_config(system.config, data.pairs, overrides or {})
        table[system.title] = run_system(config, workdir / system.config, data.corpus, "test", MEASURES)
        changes.append(system.change.format(steps=config.train.steps, pairs=config.train.batch_size))
    print_results(workdir, data, table, changes)
    print(f"\n{time.perf_counter() - begin:.0f} seconds in all.")
    return workdir / "results.md"


def demo_config(name: str, pairs: Path, overrides: Mapping[str, Any]) -> ConfigDict:
    """configs/demo.py:NAME with the data's place filled in; what is not trained stays so."""
    config = load(f"demo:{name}")
    untrained = {"train.steps": 0} if config.train.steps == 0 else {}
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


def told_changes(
    table: Mapping[str, Evaluation], changes: Sequence[str], render: Callable[[Row, Sequence[Row], int], str]
) -> str:
    """A line for every row but the first: what it changed of the row above, by how much, and whether other questions
    would say so too. changes: one for each of these rows."""
    values = [evaluation.per_query[MEASURE] for evaluation in table.values()]
    found = [compare(above, row, seed=0) for above, row in itertools.pairwise(values)]
    corrected = holm([one.p_permutation for one in found])
    header = ["against the row above", "what changed", MEASURE, "95 %", "p", "significant"]
    rows = [
        [title, change, f"{one.difference:+.4f}", f"{one.low:+.4f} to {one.high:+.4f}", told_p(p), _verdict(p)]
        for title, change, one, p in zip(list(table)[1:], changes, found, corrected, strict=True)
    ]
    note = (
        f"p: paired randomisation test over {found[0].queries} questions, two-sided, Holm's correction for "
        f"{len(found)} tests; significant: below {LEVEL}. One seed each: of other seeds this says nothing."
    )
    return f"{render(header, rows, 2)}\n\n{note}"


def _verdict(p: float) -> str:
    return "yes" if p < LEVEL else "no"


def print_results(workdir: Path, data: DemoData, table: Mapping[str, Evaluation], changes: Sequence[str]) -> None:
    """The table, what each row changed, a few answers, where things are, and what to do next."""
    with atomic_write(workdir / "results.md") as file:
        file.write(f"{to_markdown(table)}\n\n{told_changes(table, changes, piped)}\n")
    print(f"\nQuestions about Python, {len(data.passages):,} docstrings to choose from:\n")
    print(f"{to_text(table)}\n\n{told_changes(table, changes, aligned)}")
    best = max(SYSTEMS, key=lambda system: table[system.title].mean[MEASURE])
    print(f"\nThe first three passages of the best of them, {best.title}:")
    show_answers(workdir / best.config, data, data.questions[:: max(len(data.questions) // SHOWN, 1)][:SHOWN])
    print(f"""
Saved in {workdir}: the data (data/), and for each system its config, checkpoints, vectors, run file and evaluation
({", ".join(system.config for system in SYSTEMS)}); the tables are in {workdir / "results.md"}.

Ask it something (after `make demo`: source .venv/bin/activate):
  jaxret search --workdir={workdir / best.config} --query="how do I sort a list of dictionaries by a key?"

The same on your own data, in any format of docs/data.md:
  jaxret train  --config=minilm:mlr --workdir=runs/mine --config.data.train=FOLDER_OR_FILE
  jaxret encode --workdir=runs/mine --corpus=FOLDER_OR_FILE
  jaxret search --workdir=runs/mine --queries=FILE --qrels=FILE --k=100""")


def show_answers(run_folder: Path, data: DemoData, questions: Sequence[Query]) -> None:
    """Prints the top three from the run file that the search wrote."""
    ranking = read_run(Workdir(run_folder).rankings(result_name(str(data.corpus), str(data.corpus), "test")))
    by_id = {passage.id: passage for passage in data.passages}
    for question in questions:
        print(f"\n{question.text}")
        print_ranking(ranking[question.id][:3], by_id)
