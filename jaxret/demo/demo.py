"""Train, encode, search and evaluate on shipped text: the documentation of Python's standard library.

Five systems answer questions written by hand from all docstrings: BM25, the untrained first layers of MiniLM, a dual
encoder and a multi-layer retriever trained from these, and all of MiniLM without training. The tables show their
measures, and compare each row with the one above it by a paired test.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs import load_config
from jaxret.data.formats import Corpus, RankingSource, write_beir
from jaxret.data.records import Judgement, Passage, Query
from jaxret.demo.python_docs import SummaryPair, load_docstrings, load_questions
from jaxret.evaluation.comparison import format_p_value
from jaxret.evaluation.evaluation_report import emit_table, evaluation_markdown, evaluation_text, write_evaluation
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.significance import LEVEL, holm, paired_comparison
from jaxret.evaluation.text_table import Row, aligned_table, markdown_table
from jaxret.experiments.report.report_options import ReportOptions
from jaxret.experiments.report.write_report import write_report
from jaxret.experiments.searches.answer_question import print_ranking
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.run_system import MEASURES, run_system
from jaxret.experiments.vector_diversity import JudgedSource, report_diversity
from jaxret.parallel.events import emit
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.bm25 import BM25
from jaxret.storage.atomic import atomic_write


@dataclass(frozen=True)
class DemoSystem:
    """A row of the tables."""

    config: str  # suffix of configs/demo.py
    title: str  # name of the row
    shows: str  # question that the row answers
    change: str  # difference from the row above; {steps} and {pairs} (of a batch) are filled in


SYSTEMS = (
    DemoSystem(
        "first_layers",
        "MiniLM's layers 1-5, untrained",
        "where training starts: the model before it has learnt anything here",
        "vectors, not words; layers not tuned for retrieval",
    ),
    DemoSystem(
        "dual_encoder",
        "dual encoder from these",
        "what seconds of training add: one vector for a text",
        "training: {steps} steps of {pairs} pairs",
    ),
    DemoSystem(
        "mlr",
        "MLR {4,5} from these",
        "whether a passage's vectors from two layers add to that",
        "as many steps; a passage's layers 4 and 5, not 5 alone",
    ),
    DemoSystem(
        "as_it_comes",
        "MiniLM's 6 layers, untrained",
        "the whole model as published, for scale",
        "published training on a billion pairs, none here",
    ),
)
BASELINE = "BM25"
ROW_MEASURE = "nDCG@10"  # measure by which a row is compared with the row above
DEMO_SPLITS = ("train", "dev")
REPORT = "report.html"
_ANSWERS = 5  # questions whose answers are printed


@dataclass(frozen=True)
class DemoData:
    """The data of the demo: files and their records."""

    python_docs: Path  # BEIR folder: every docstring, the questions, qrels/test.tsv
    pairs: Path  # BEIR folder: training and dev pairs
    passages: list[Passage]
    questions: list[Query]
    judgements: list[Judgement]

    @cached_property
    def source(self) -> EvaluationSource:
        """The questions and the judgements, as files."""
        return EvaluationSource.open(self.python_docs, self.python_docs)


def demo(workdir: str | Path, overrides: Mapping[str, Any] | None = None, max_passages: int | None = None) -> Path:
    """Run all systems in `workdir`, and return the path of the tables. A second call continues where the first stopped.

    For tests, `overrides` sets config keys ({"train.steps": 2}), and `max_passages` makes the corpus smaller (judged
    passages and the first other ones).
    """
    begin = time.perf_counter()
    workdir = Path(workdir)
    data = write_data(workdir / "data", max_passages)
    print_plan(data)
    corpus = Corpus.open(data.python_docs)
    table: dict[str, Evaluation] = {BASELINE: evaluate_bm25(data, workdir)}
    changes: list[str] = []
    for system in SYSTEMS:
        print(f"\n== {system.title}")
        config = demo_config(system.config, data.pairs, overrides or {})
        table[system.title] = run_system(config, workdir / system.config, corpus, data.source, MEASURES)
        changes.append(system.change.format(steps=config.train.steps, pairs=config.train.batch_size))
    print_results(workdir, data, table, changes)
    write_demo_report(workdir, data)
    emit("file", kind="report", path=workdir / REPORT)
    print(f"\n{time.perf_counter() - begin:.0f} seconds in all.")
    print_commands(workdir)
    return workdir / "results.md"


def write_demo_report(workdir: Path, data: DemoData) -> None:
    """Count which vectors win, and write the report of the runs of all systems but BM25."""
    report_diversity(open_run(workdir / "mlr"), JudgedSource.open(data.python_docs, "test"))
    runs = [str(workdir / system.config) for system in SYSTEMS]
    write_report(runs, workdir / REPORT, ReportOptions(title="Questions about Python"))


def demo_config(name: str, pairs: Path, overrides: Mapping[str, Any]) -> ConfigDict:
    """Return configs/demo.py:NAME with the path of the data. An untrained system has no training and no validation."""
    config = load_config(f"demo:{name}")
    no_training = {"train.steps": 0, "data.dev": ""} if config.train.steps == 0 else {}
    config.update_from_flattened_dict({"data.train": str(pairs), "data.dev": str(pairs), **overrides, **no_training})
    return config


def write_data(folder: Path, max_passages: int | None = None) -> DemoData:
    """Write the shipped docstrings, pairs and questions as two BEIR folders."""
    passages, pairs = load_docstrings()
    questions, judgements = load_questions()
    if max_passages:
        judged_ids = {judgement.passage_id for judgement in judgements}
        distractors = [passage for passage in passages if passage.id not in judged_ids]
        left_out = {passage.id for passage in distractors[max(max_passages - len(judged_ids), 0) :]}
        passages = [passage for passage in passages if passage.id not in left_out]
    sides: dict[str, list[SummaryPair]] = {side: [pair for pair in pairs if pair.split == side] for side in DEMO_SPLITS}
    if max_passages:
        sides = {"train": sides["train"][:max_passages], "dev": sides["dev"][: max_passages // 4]}
    write_beir(folder / "python-docs", passages, questions, {"test": judgements})
    pairs = [pair for side in DEMO_SPLITS for pair in sides[side]]
    write_beir(
        folder / "pairs",
        [pair.passage for pair in pairs],
        [pair.query for pair in pairs],
        {side: [Judgement(pair.query.id, pair.passage.id, 1) for pair in sides[side]] for side in DEMO_SPLITS},
    )
    counts = f"{len(sides['train']):,} training and {len(sides['dev']):,} dev pairs, {len(questions)} questions"
    print(f"Documentation of Python 3.11: {len(passages):,} docstrings, {counts}")
    return DemoData(folder / "python-docs", folder / "pairs", passages, questions, judgements)


def print_plan(data: DemoData) -> None:
    """Print the purpose of the demo, and the meaning of each row of its tables."""
    print(f"""
This demo trains two retrievers and measures how well they find the docstring that answers a question, compared
with word matching and an untrained model. They learn from pairs (first sentence of a docstring -> rest of it); the
{len(data.questions)} questions are not part of training. It takes minutes on two cores. What each row shows:
  {BASELINE:<32}what matching words finds, without a model""")
    for system in SYSTEMS:
        print(f"  {system.title:<32}{system.shows}")


def evaluate_bm25(data: DemoData, workdir: Path) -> Evaluation:
    """Evaluate word matching on the same passages, questions and judgements."""
    ranking = BM25.of(data.passages, progress=True).search(data.questions, k=100, progress=True)
    evaluation = evaluate(ranking, data.judgements, MEASURES)
    write_evaluation(workdir / "bm25.json", evaluation, {"system": "BM25", "k1": 0.9, "b": 0.4, "k": 100})
    return evaluation


def change_table(
    table: Mapping[str, Evaluation], changes: Sequence[str], render: Callable[[Row, Sequence[Row], int], str]
) -> str:
    """Return a table of each row's difference from the row above, with a paired test over the questions.

    `changes` describes each row but the first. `render` is `aligned_table` or `markdown_table`.
    """
    values = [evaluation.per_query[ROW_MEASURE] for evaluation in table.values()]
    differences = [paired_comparison(above, row, seed=0) for above, row in itertools.pairwise(values)]
    p_values = holm([difference.p_permutation for difference in differences])
    header = ["against the row above", "what changed", ROW_MEASURE, "95 %", "p", "significant"]
    rows = [
        [title, change, *difference.cells, format_p_value(p_value), "yes" if p_value < LEVEL else "no"]
        for title, change, difference, p_value in zip(list(table)[1:], changes, differences, p_values, strict=True)
    ]
    note = (
        f"p: paired randomization test over {differences[0].queries} questions, two-sided, Holm's correction for "
        f"{len(differences)} tests; significant: below {LEVEL}. Each system was trained with one seed."
    )
    return f"{render(header, rows, 2)}\n\n{note}"


def print_results(workdir: Path, data: DemoData, table: Mapping[str, Evaluation], changes: Sequence[str]) -> None:
    """Save and print the two tables, and some answers of the best system.

    Args:
        workdir: the demo's folder; results.md is written there.
        table: title of a row -> its evaluation.
        changes: description of the difference from the row above, for each row but the first.
    """
    with atomic_write(workdir / "results.md") as file:
        file.write(f"{evaluation_markdown(table)}\n\n{change_table(table, changes, markdown_table)}\n")
    print(f"\nQuestions about Python, {len(data.passages):,} docstrings to choose from:\n")
    print(f"{evaluation_text(table)}\n\n{change_table(table, changes, aligned_table)}")
    emit_table(table, workdir / "results.md")
    best = max(SYSTEMS, key=lambda system: table[system.title].mean[ROW_MEASURE])
    print(f"\nThe first three passages of the best of them, {best.title}:")
    show_answers(workdir / best.config, data, data.questions[:: max(len(data.questions) // _ANSWERS, 1)][:_ANSWERS])


def print_commands(workdir: Path) -> None:
    """Print the paths of the files, the commands for other data, and last the command to type next."""
    print(f"""
Saved in {workdir}: the data (data/), and for each system its config, checkpoints, vectors, run file and evaluation
({", ".join(system.config for system in SYSTEMS)}); the tables are in {workdir / "results.md"}.
The report, which a browser opens: {workdir / REPORT}

The same on your own data, in any format of docs/data.md:
  jaxret train  --config=minilm:mlr --workdir=runs/mine --config.data.train=FOLDER_OR_FILE
  jaxret encode --workdir=runs/mine --corpus=FOLDER_OR_FILE
  jaxret search --workdir=runs/mine --queries=FILE --qrels=FILE --k=100

Next, ask the retriever that was trained here a question (after `make demo`: source .venv/bin/activate):
  jaxret search --workdir={workdir / "mlr"} --query="how do I sort a list of dictionaries by a key?\"""")


def show_answers(run_folder: Path, data: DemoData, questions: Sequence[Query]) -> None:
    """Print the first three passages for each question, from the run file that the search wrote."""
    ranking = RankingSource.open(Workdir(run_folder).rankings(data.source.name)).read()
    by_id = {passage.id: passage for passage in data.passages}
    for question in questions:
        print(f"\n{question.text}")
        print_ranking(ranking[question.id][:3], by_id)
