"""The names of evaluations, and digests of queries in an evaluation and in training data."""

from __future__ import annotations

import gzip
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import DataSource, QuerySource
from jaxret.data.records import Query
from jaxret.experiments.searches.evaluation_queries import EvaluationQueries, EvaluationSource
from jaxret.mining.training_queries import TrainingQueries, TrainingQuery
from jaxret.storage.atomic import sha256_json

SOURCE = EvaluationSource(QuerySource(DataSource.open("data"), "test", ()), None)
QUERY = Query("q1", "what is a river", ("water",))
OTHERS: dict[str, Any] = {
    "id": "q2",
    "text": "what is a stone",
    "answers": ("water", "flow"),
    "instruction": "Find definitions.",
}


def digests(query: Query) -> tuple[str, str]:
    evaluated = EvaluationQueries([query], [], SOURCE).digests()["queries"]
    return evaluated, TrainingQueries((TrainingQuery(query),), False).digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Query)])
def test_every_field_of_a_query_is_in_the_digests(field: str) -> None:
    changed = replace(QUERY, **{field: OTHERS[field]})
    assert all(one != other for one, other in zip(digests(QUERY), digests(changed), strict=True))
    assert QUERY.to_json() != changed.to_json()


def test_digests_of_queries_without_instructions_stay_as_they_are() -> None:
    values = ["q1", "what is a river", ["water"]]
    assert digests(QUERY) == (sha256_json([values]), sha256_json([[*values, []]]))


@pytest.mark.parametrize(
    ("queries", "qrels", "name"),
    [
        ("scifact", "", "scifact"),
        ("scifact", "scifact", "scifact.test"),
        ("scifact/queries.jsonl", "", "scifact"),
        ("scifact/queries.jsonl", "scifact/qrels/test.tsv", "scifact.test"),
        ("x/nq-test.qa.csv", "", "nq-test"),
        ("nq/test.qa.csv", "", "nq-test"),
        ("trivia/test.qa.csv", "", "trivia-test"),
        ("msmarco/queries.eval.tsv.gz", "", "msmarco-eval"),
        ("msmarco/queries.dev.tsv", "", "msmarco-dev"),
        ("msmarco/queries.dev.small.tsv", "msmarco/qrels.dev.small.tsv", "msmarco-dev.small"),
        ("msmarco/queries.dev.tsv", "msmarco/qrels.dev.small.tsv", "msmarco-dev.dev.small"),
    ],
)
def test_a_result_is_named_after_queries_and_split(queries: str, qrels: str, name: str, tmp_path: Path) -> None:
    for file in ("scifact/queries.jsonl", "scifact/qrels/test.tsv", queries, qrels):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix:
            path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"")
    source = EvaluationSource.open(tmp_path / queries, tmp_path / qrels if qrels else "")
    assert source.name == name
    assert source.has_every_split == (queries == "scifact" and not qrels)
