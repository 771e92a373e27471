"""Paired tests: p-values against scipy and exhaustive enumeration, with and without a difference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from jaxret.evaluation.significance import holm, paired_comparison, randomization, welch_p_value


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
    assert paired_comparison(baseline, system, seed=0).p_permutation == pytest.approx(expected)


def test_t_test_equals_scipy() -> None:
    baseline, system = values(0, 40), values(1, 40, shift=0.1)
    expected = stats.ttest_rel(list(system.values()), list(baseline.values())).pvalue
    unpaired = stats.ttest_ind(list(system.values()), list(baseline.values())).pvalue
    p_t = paired_comparison(baseline, system, seed=0).p_t
    assert p_t == pytest.approx(expected, rel=1e-12)
    assert p_t != pytest.approx(unpaired, rel=1e-3)


def test_many_queries_agree_with_the_t_test() -> None:
    """For many queries, the two tests nearly agree."""
    result = paired_comparison(values(0, 500), values(1, 500, shift=0.065), seed=0)
    assert result.p_t is not None
    assert 0.01 < result.p_t < 0.3
    assert result.p_permutation == pytest.approx(result.p_t, abs=0.015)


def test_interval_is_near_the_normal_one() -> None:
    baseline, system = values(0, 500), values(1, 500, shift=0.1)
    differences = np.array([system[query] - baseline[query] for query in baseline])
    half = 1.96 * differences.std(ddof=1) / np.sqrt(500)
    result = paired_comparison(baseline, system, seed=0)
    assert result.difference == pytest.approx(differences.mean())
    assert result.low == pytest.approx(differences.mean() - half, abs=0.1 * half)
    assert result.high == pytest.approx(differences.mean() + half, abs=0.1 * half)


def test_sign_and_symmetry() -> None:
    baseline, system = values(0, 9), values(1, 9, shift=0.2)
    forward, backward = paired_comparison(baseline, system, seed=0), paired_comparison(system, baseline, seed=0)
    assert forward.difference > 0
    assert backward.difference == pytest.approx(-forward.difference)
    assert backward.p_permutation == pytest.approx(forward.p_permutation)
    assert backward.p_t == pytest.approx(forward.p_t)


def test_results_depend_on_the_seed_not_on_the_order_of_queries() -> None:
    baseline, system = values(0, 50), values(1, 50, shift=0.05)
    result = paired_comparison(baseline, system, seed=3, resamples=500)
    shuffled = dict(sorted(system.items(), reverse=True))
    assert paired_comparison(baseline, shuffled, seed=3, resamples=500) == result
    assert paired_comparison(baseline, system, seed=4, resamples=500) != result


def test_memory_bound_does_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, system = values(0, 50), values(1, 50, shift=0.05)
    result = paired_comparison(baseline, system, seed=3, resamples=500)
    monkeypatch.setattr("jaxret.evaluation.significance._NUMBERS_AT_ONCE", 50 * 7)
    assert paired_comparison(baseline, system, seed=3, resamples=500) == result


def test_equal_systems_do_not_differ() -> None:
    result = paired_comparison(values(0, 20), values(0, 20), seed=0)
    assert (result.difference, result.low, result.high) == (0, 0, 0)
    assert (result.p_permutation, result.queries) == (1, 20)
    assert (result.t, result.p_t) == (None, None), "0 / 0 is undefined"


def test_bad_input_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1 queries .*\(such .*'q3'\)"):
        paired_comparison(values(0, 3), values(0, 4), seed=0)
    with pytest.raises(ValueError, match=r"queries .*1"):
        paired_comparison(values(0, 1), values(1, 1), seed=0)
    with pytest.raises(ValueError, match="not finite"):
        paired_comparison(values(0, 3), values(0, 3) | {"q1": float("nan")}, seed=0)


A = dict(zip("abcdefghij", [0.50, 0.30, 0.80, 0.10, 0.60, 0.40, 0.70, 0.20, 0.90, 0.55]))
B = dict(zip("abcdefghij", [0.60, 0.25, 0.90, 0.30, 0.60, 0.55, 0.75, 0.15, 1.00, 0.75]))


def test_golden_values() -> None:
    """The values were computed independently with numpy. Eight of the 40 sign vectors reach the observed sum only up to
    rounding."""
    comparison = paired_comparison(A, B, seed=0)
    assert (comparison.difference, comparison.t, comparison.p_t) == pytest.approx((0.08, 2.752989, 0.0223672), rel=1e-5)
    assert comparison.p_permutation == 40 / 1024
    assert (comparison.wins, comparison.ties, comparison.losses) == (7, 1, 2)


def test_drawn_sign_vectors_agree_with_all_of_them() -> None:
    differences = np.array([B[query] - A[query] for query in A])
    drawn = randomization(differences, 1023, np.random.default_rng(0))
    assert drawn == pytest.approx(40 / 1024, abs=0.03)
    assert drawn * 1024 == pytest.approx(round(drawn * 1024), abs=1e-9), (
        "the observed sum counts, too: (1 + n) / (1 + 1023)"
    )
    assert randomization(np.ones(40), 1000, np.random.default_rng(0)) == 1 / 1001, "p is never 0"


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_over_runs_is_welchs_test() -> None:
    before, after = [0.51, 0.52, 0.50, 0.53, 0.515], [0.54, 0.53, 0.56]
    variances = [np.var(values, ddof=1) / len(values) for values in (before, after)]
    t = (np.mean(after) - np.mean(before)) / np.sqrt(sum(variances))
    degrees = sum(variances) ** 2 / (variances[0] ** 2 / 4 + variances[1] ** 2 / 2)
    p_value = welch_p_value(before, after)
    assert p_value == pytest.approx(2 * stats.t.sf(abs(t), degrees))
    assert p_value != pytest.approx(stats.ttest_ind(before, after).pvalue, rel=1e-2)
    assert welch_p_value([0.5], after) is None
    assert welch_p_value([0.5, 0.5], [0.6, 0.6]) is None


@pytest.mark.filterwarnings("error")
def test_runs_of_one_system_may_be_equal() -> None:
    """Welch's test is defined here, and jaxret does not show scipy's warning about lost precision."""
    equal, others = [0.3, 0.3, 0.3], [0.35, 0.4, 0.45]
    expected = stats.ttest_1samp(others, 0.3).pvalue
    assert welch_p_value(equal, others) == pytest.approx(expected)
    with pytest.warns(RuntimeWarning, match="Precision loss"):
        # Control: scipy has this value, too.
        assert stats.ttest_ind(others, equal, equal_var=False).pvalue == pytest.approx(expected)
