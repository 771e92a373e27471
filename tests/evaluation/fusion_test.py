"""Fusion against sums by hand, and the rule for passages that are missing in one ranking."""

from __future__ import annotations

import numpy as np
import pytest

from jaxret.data.records import Judgement, Rankings
from jaxret.evaluation.fusion import FUSION_METHODS, best_weights, fuse, tune_weights

SPARSE: Rankings = {"q": [("a", 12.0), ("b", 9.0), ("c", 3.0)], "r": [("a", 1.0)]}
DENSE: Rankings = {"q": [("c", 0.9), ("d", 0.8), ("a", 0.1)]}


def test_reciprocal_ranks_are_sums_over_rankings() -> None:
    fused = fuse([SPARSE, DENSE], "rrf")
    expected = {"a": 1 / 61 + 1 / 63, "b": 1 / 62, "c": 1 / 63 + 1 / 61, "d": 1 / 62}
    assert dict(fused["q"]) == pytest.approx(expected)
    assert [passage for passage, _ in fused["q"]] == ["a", "c", "b", "d"], "ties are ordered by rank in the first run"
    assert fused["r"] == [("a", 1 / 61)]


def test_min_max_scales_each_ranking() -> None:
    fused = fuse([SPARSE, DENSE], "min_max", (0.25, 0.75))
    expected = {"a": 0.25, "b": 0.25 * 6 / 9, "c": 0.75, "d": 0.75 * 0.7 / 0.8}
    assert dict(fused["q"]) == pytest.approx(expected)
    assert fused["r"] == [("a", 0.25)], "a single passage gets the best score of its ranking"


def test_z_scores_of_a_missing_passage_are_the_lowest() -> None:
    """If the score were 0, the mean, then "d" would beat "b" in the sparse ranking, although "d" is not in it."""
    fused = dict(fuse([SPARSE, {"q": [("d", 1.0), ("b", 1.0)]}], "z_score", (1.0, 0.0))["q"])
    z = (np.array([12.0, 9.0, 3.0]) - 8) / np.std([12.0, 9.0, 3.0])
    assert fused == pytest.approx({"a": z[0], "b": z[1], "c": z[2], "d": z[2]})


@pytest.mark.parametrize("method", FUSION_METHODS)
def test_a_retrieved_passage_is_never_below_one_that_is_not(method: str) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        scores = np.sort(random.normal(size=7))[::-1]
        run: Rankings = {"q": [(f"p{i}", float(score)) for i, score in enumerate(scores)]}
        fused = fuse([run, {"q": [("other", 1.0)]}], method, (1.0, 0.0))["q"]
        assert {passage for passage, score in fused if score == min(fused, key=lambda hit: hit[1])[1]} >= {"other"}


def test_a_single_run_keeps_its_order() -> None:
    for method in FUSION_METHODS:
        assert [passage for passage, _ in fuse([SPARSE, DENSE], method, (1.0, 0.0))["q"]][:2] == ["a", "b"]
        assert [passage for passage, _ in fuse([SPARSE, DENSE], method, (0.0, 1.0), k=2)["q"]] == ["c", "d"]


def test_weights_are_those_with_the_best_measure() -> None:
    judgements = [Judgement("q", "d", 1)]
    weights, value = tune_weights([SPARSE, DENSE], judgements, "RR@10", "min_max")
    values = {
        first / 20: next(
            1 / rank
            for rank, (passage, _) in enumerate(fuse([SPARSE, DENSE], "min_max", (first / 20, 1 - first / 20))["q"], 1)
            if passage == "d"
        )
        for first in range(21)
    }
    assert value == max(values.values()) == values[weights[0]]
    assert sum(weights) == 1


def test_of_weights_with_equal_values_the_most_even_ones_are_taken() -> None:
    judgements = [Judgement("q", "a", 1)]
    assert tune_weights([SPARSE, SPARSE], judgements, "RR@10", "rrf") == ((0.5, 0.5), 1.0)
    assert best_weights({(0.8, 0.2): 0.7, (0.4, 0.6): 0.7, (0.6, 0.4): 0.6}) == ((0.4, 0.6), 0.7)


def test_weights_of_three_runs_sum_to_one() -> None:
    weights, _ = tune_weights([SPARSE, DENSE, SPARSE], [Judgement("q", "a", 1)], "RR@10", "rrf")
    assert len(weights) == 3
    assert sum(weights) == pytest.approx(1)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="must be one of rrf, min_max, z_score"):
        fuse([SPARSE, DENSE], "sum")
    with pytest.raises(ValueError, match="there are 1 weights for 2 runs"):
        fuse([SPARSE, DENSE], "rrf", (1.0,))
