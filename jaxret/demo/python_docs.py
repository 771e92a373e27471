"""The demo's data: documentation of Python 3.11's standard library, and questions about it.

`corpus.jsonl.gz` has the docstrings of the public modules, classes, functions and methods, under the names that users
type (LICENSE-python.txt). If the first sentence of a docstring summarizes it, the record also has a training pair: the
summary is the query, and the rest is the passage. The test questions (`questions.jsonl`) were written by hand. All
docstrings are searched for their answers. The training data have no question, but may have the docstring that answers
one, with its summary.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib import resources

from jaxret.data.records import Judgement, Passage, Query


@dataclass(frozen=True, slots=True)
class SummaryPair:
    """A training example: the passage is a docstring without the sentence that is the query."""

    query: Query
    passage: Passage
    split: str  # train, or dev (about one in ten)


def load_docstrings() -> tuple[list[Passage], list[SummaryPair]]:
    """Return the corpus, sorted by id, and its training pairs. A passage's id and title are its name in Python."""
    passages, pairs = [], []
    with resources.files("jaxret.demo").joinpath("corpus.jsonl.gz").open("rb") as file:
        for line in gzip.decompress(file.read()).splitlines():
            record = json.loads(line)
            name = record["_id"]
            passages.append(Passage(name, record["text"], name))
            if "split" in record:
                passage = Passage(name, record["rest"], name)
                pairs.append(SummaryPair(Query(name, record["summary"]), passage, record["split"]))
    return passages, pairs


def load_questions() -> tuple[list[Query], list[Judgement]]:
    """Return the test questions, with ids from q001 on, and judgements of the passages that answer them."""
    queries: list[Query] = []
    judgements: list[Judgement] = []
    text = resources.files("jaxret.demo").joinpath("questions.jsonl").read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        record = json.loads(line)
        queries.append(Query(f"q{number:03d}", record["question"]))
        judgements += [Judgement(queries[-1].id, name, 1) for name in record["relevant"]]
    return queries, judgements
