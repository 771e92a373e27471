"""A request to a cross-encoder checks itself before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from jaxret.experiments.rerank_request import OF_RUNS, RerankRequest

OTHER_VALUES: dict[str, Any] = {
    "queries": "q",
    "corpus": "c",
    "qrels": "j",
    "measures": ("RR@5",),
    "self_matches": "keep",
    "k": 5,
    "tail": False,
    "match": "regex",
    "latency": 0,
}


@pytest.mark.parametrize("name", OF_RUNS)
def test_training_data_are_not_evaluated(name: str) -> None:
    value, source = {name: OTHER_VALUES[name]}, {"queries": "q", "corpus": "c"}
    RerankRequest(out="o", workdir="w", run="r", **source | value)
    for values in (value, {"explicit_fields": (name,)}):
        with pytest.raises(ValueError, match=f"--{name} needs --run"):
            RerankRequest(out="o", workdir="w", train="t", **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": "r"}, "either --workdir"),
        ({"workdir": "w", "model": "m", "run": "r"}, "either --workdir"),
        ({"workdir": "w"}, "either --run"),
        ({"model": "m", "run": "r", "train": "t"}, "either --run"),
        ({"model": "m", "run": "r", "queries": "q", "corpus": "c", "negatives_run": "n"}, "--negatives_run needs"),
        ({"model": "m", "run": "r", "queries": "q"}, "--run needs --queries and --corpus"),
    ],
)
def test_values_that_exclude_each_other_or_are_missing(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RerankRequest(out="o", **values)
