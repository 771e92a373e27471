"""A search checks its options before a run is opened."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.search_job import SearchJob, parse_counts
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions
from jaxret.search.search_options import SearchOptions

OTHER_VALUES = {
    "measures": ("RR@5",),
    "name": "x",
    "label": "x",
    "self_matches": "keep",
    "latency": 0,
    "latency_passages": (9,),
    "dpr_results": True,
    "match": "regex",
    "on_error": "skip",
}


@pytest.mark.parametrize(("name", "value"), OTHER_VALUES.items())
def test_an_evaluation_needs_queries_of_files(name: str, value: Any) -> None:
    evaluation = EvaluationOptions(k=5, **{name: value})
    SearchJob("w", queries="q", qrels="r", evaluation=evaluation)
    for target in ({"query": "x"}, {"interactive": True}):
        with pytest.raises(ValueError, match=f"--{name} needs --queries"):
            SearchJob("w", **target, evaluation=evaluation)


def test_every_option_of_an_evaluation_has_a_case() -> None:
    assert {field.name for field in dataclasses.fields(EvaluationOptions)} - {"k"} == set(OTHER_VALUES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"query": "x", "qrels": "r"}, "--qrels needs --queries"),
        ({"query": "x", "split": "dev"}, "--split needs --queries"),
        ({"query": "x", "explicit_fields": ("split",)}, "--split needs --queries"),
        ({}, "give either --query"),
        ({"query": "x", "queries": "q"}, "give either --query"),
        ({"query": " "}, "the question is blank"),
        ({"query": "x", "sizes": (64, 0)}, "--dimension=64,all: several sizes"),
        (
            {"query": "x", "engine": EngineOptions("ray"), "processes": JobOptions("auto")},
            "--engine and --coordinator are two",
        ),
        ({"interactive": True, "processes": JobOptions("auto")}, "remove --coordinator"),
        ({"query": "x", "engine": EngineOptions("ray"), "options": SearchOptions(index="i")}, "search exactly"),
        (
            {"queries": "q", "engine": EngineOptions("ray"), "evaluation": EvaluationOptions(latency=9)},
            "remove them, or --engine",
        ),
        (
            {"queries": "q", "evaluation": EvaluationOptions(latency=0, latency_passages=(9,))},
            "--latency_passages .*--latency=0",
        ),
    ],
)
def test_values_that_exclude_each_other(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchJob("w", **values)


def test_numbers_of_passages() -> None:
    assert parse_counts(["9", "100"]) == (9, 100)
    with pytest.raises(ValueError, match="--latency_passages=9,-1: '-1' is not"):
        parse_counts(["9", "-1"])
