"""Local variation, perplexity and winners, against values by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jaxret.evaluation.diversity import diversity, local_variation, normalized_scores, perplexity


def test_local_variation_is_the_best_minus_the_mean_of_the_others() -> None:
    assert local_variation(np.array([[3.0, 1.0, 2.0], [0.0, 0.0, 6.0]])) == pytest.approx((1.5 + 6) / 2)
    assert local_variation(np.full((4, 5), 2.0)) == 0


def test_the_paper_s_numbers_fit_softmax() -> None:
    """LV .126 with 8 viewers corresponds to a best share of .235: .235 - .765 / 7 = .126 (MVR, table 6)."""
    shares = np.array([[0.235, *[0.765 / 7] * 7]])
    assert local_variation(shares) == pytest.approx(0.126, abs=1e-3)


def test_norms() -> None:
    queries, vectors = np.array([[3.0, 4.0]], np.float32), np.array([[[3.0, 4.0], [0.0, 2.0]]], np.float32)
    np.testing.assert_allclose(normalized_scores(queries, vectors, "none"), [[25, 8]])
    np.testing.assert_allclose(normalized_scores(queries, vectors, "cosine"), [[1, 0.8]])
    np.testing.assert_allclose(normalized_scores(queries, vectors, "softmax"), [[1, math.exp(-17)] / (1 + np.exp(-17))])


def test_perplexity_counts_effective_vectors() -> None:
    """The queries of passage 7 choose vectors 0 and 1 equally often, those of passage 8 always 2; passage 9 has only
    one query."""
    winners, passages = np.array([0, 1, 2, 2, 2, 0]), np.array([7, 7, 8, 8, 8, 9])
    mean, counted = perplexity(winners, passages)
    assert mean == pytest.approx((2 + 1) / 2)
    assert counted == 2
    mean, counted = perplexity(np.array([0, 1]), np.array([1, 2]))
    assert mean is None
    assert counted == 0


def test_perplexity_compares_no_passage_with_all_pairs() -> None:
    """The result equals that of a plain loop, without comparing every passage with all pairs."""

    class Passages(np.ndarray[Any, Any]):
        def __eq__(self, other: object) -> Any:
            raise AssertionError("all pairs were compared with a passage")

    generator = np.random.default_rng(0)
    winners, passages = generator.integers(0, 4, 1000), generator.integers(0, 300, 1000)
    values = []
    for passage in range(300):
        wins = winners[passages == passage]
        if len(wins) >= 2:
            shares = np.bincount(wins, minlength=4) / len(wins)
            shares = shares[shares > 0]
            values.append(np.exp(-(shares * np.log(shares)).sum()))
    mean, counted = perplexity(winners, passages.view(Passages))
    assert mean == pytest.approx(np.mean(values))
    assert counted == len(values) > 200


def test_all_measures_together() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((50, 4, 6)).astype(np.float32)
    queries = vectors[np.arange(50), np.arange(50) % 4] * 3  # vector i mod 4 wins pair i
    result = diversity(queries, vectors, np.arange(50) // 10)
    assert sum(result.wins) == result.pairs == 50
    assert max(result.wins) - min(result.wins) <= 6
    assert result.passages == 5
    assert result.perplexity is not None
    assert 2 < result.perplexity <= 4
    assert 0 < result.local_variation["softmax"] < 1
    assert not result.equal
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    pairs = [1 - (unit[:, i] * unit[:, j]).sum(axis=-1) for i in range(4) for j in range(4) if i != j]
    assert result.distance == pytest.approx(float(np.mean(pairs)), rel=1e-5)
    same = diversity(queries, np.repeat(vectors[:, :1], 4, axis=1), np.arange(50) // 10)
    assert same.equal
    assert (same.perplexity, same.wins) == (1.0, (50, 0, 0, 0))
    assert abs(same.local_variation["none"]) < 1e-9
