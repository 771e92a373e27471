"""Digests of queries: of an evaluation, of training data."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from jaxret.data.records import Query
from jaxret.experiments.evaluation_queries import EvaluationQueries
from jaxret.mining.training_queries import TrainingQueries, TrainingQuery
from jaxret.storage.atomic import sha256_json

QUERY = Query("q1", "what is a river", ("water",))
OTHERS: dict[str, Any] = {
    "id": "q2",
    "text": "what is a stone",
    "answers": ("water", "flow"),
    "instruction": "Find definitions.",
}


def digests(query: Query) -> tuple[str, str]:
    evaluated = EvaluationQueries([query], [], "data", "test").digests()["queries"]
    return evaluated, TrainingQueries((TrainingQuery(query),), False).digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Query)])
def test_every_field_of_a_query_is_in_the_digests(field: str) -> None:
    changed = replace(QUERY, **{field: OTHERS[field]})
    assert all(one != other for one, other in zip(digests(QUERY), digests(changed), strict=True))
    assert QUERY.to_json() != changed.to_json()


def test_digests_of_queries_without_instructions_stay_as_they_are() -> None:
    values = ["q1", "what is a river", ["water"]]
    assert digests(QUERY) == (sha256_json([values]), sha256_json([[*values, []]]))
