"""Paired tests: p-values against scipy and exhaustive enumeration, behaviour with and without a difference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from jaxret.evaluation.significance import compare


def values(seed: int, n: int, shift: float = 0.0) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {f"q{i}": float(value) for i, value in enumerate(rng.random(n) + shift)}


def test_few_queries_give_the_exact_permutation_p_value() -> None:
    baseline, system = values(0, 9), values(1, 9, shift=0.2)
    differences = np.array([system[query] - baseline[query] for query in baseline])
    signs = np.array(list(itertools.product([1, -1], repeat=9)))
    means = (signs * differences).mean(axis=1)
    expected = (np.abs(means) >= abs(differences.mean()) - 1e-12).mean()
    assert 0.01 < expected < 0.9
    assert compare(baseline, system, seed=0).p_permutation == pytest.approx(expected)


def test_t_test_equals_scipy() -> None:
    baseline, system = values(0, 40), values(1, 40, shift=0.1)
    expected = stats.ttest_rel(list(system.values()), list(baseline.values())).pvalue
    unpaired = stats.ttest_ind(list(system.values()), list(baseline.values())).pvalue
    p_t = compare(baseline, system, seed=0).p_t
    assert p_t == pytest.approx(expected, rel=1e-12)
    assert p_t != pytest.approx(unpaired, rel=1e-3)


def test_many_queries_agree_with_the_t_test() -> None:
    """On well-behaved data the two tests ask nearly the same question."""
    result = compare(values(0, 500), values(1, 500, shift=0.065), seed=0)
    assert 0.01 < result.p_t < 0.3
    assert result.p_permutation == pytest.approx(result.p_t, abs=0.015)


def test_interval_is_near_the_normal_one() -> None:
    baseline, system = values(0, 500), values(1, 500, shift=0.1)
    differences = np.array([system[query] - baseline[query] for query in baseline])
    half = 1.96 * differences.std(ddof=1) / np.sqrt(500)
    result = compare(baseline, system, seed=0)
    assert result.difference == pytest.approx(differences.mean())
    assert result.low == pytest.approx(differences.mean() - half, abs=0.1 * half)
    assert result.high == pytest.approx(differences.mean() + half, abs=0.1 * half)
    narrow = compare(baseline, system, seed=0, confidence=0.5)
    assert result.low < narrow.low < narrow.high < result.high


def test_sign_and_symmetry() -> None:
    baseline, system = values(0, 9), values(1, 9, shift=0.2)
    forward, backward = compare(baseline, system, seed=0), compare(system, baseline, seed=0)
    assert forward.difference > 0
    assert backward.difference == pytest.approx(-forward.difference)
    assert backward.p_permutation == pytest.approx(forward.p_permutation)
    assert backward.p_t == pytest.approx(forward.p_t)


def test_the_seed_decides_and_the_order_of_queries_does_not() -> None:
    baseline, system = values(0, 50), values(1, 50, shift=0.05)
    result = compare(baseline, system, seed=3, resamples=500)
    shuffled = dict(sorted(system.items(), reverse=True))
    assert compare(baseline, shuffled, seed=3, resamples=500) == result
    assert compare(baseline, system, seed=4, resamples=500) != result


def test_memory_bound_does_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, system = values(0, 50), values(1, 50, shift=0.05)
    result = compare(baseline, system, seed=3, resamples=500)
    monkeypatch.setattr("jaxret.evaluation.significance._NUMBERS_AT_ONCE", 50 * 7)
    assert compare(baseline, system, seed=3, resamples=500) == result


def test_equal_systems_do_not_differ() -> None:
    result = compare(values(0, 20), values(0, 20), seed=0)
    assert (result.difference, result.low, result.high) == (0, 0, 0)
    assert (result.p_permutation, result.p_t, result.queries) == (1, 1, 20)


def test_bad_input_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1 queries have a value in one system only \(such as 'q3'\)"):
        compare(values(0, 3), values(0, 4), seed=0)
    with pytest.raises(ValueError, match="two queries or more, and there are 1"):
        compare(values(0, 1), values(1, 1), seed=0)
    with pytest.raises(ValueError, match="not finite"):
        compare(values(0, 3), values(0, 3) | {"q1": float("nan")}, seed=0)
