"""Paired significance tests between two systems, on their values for each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_NUMBERS_AT_ONCE = 2**23  # numbers drawn at a time: 64 MB as float64
# A sum of flipped differences counts as equal to the observed sum d if they differ by at most this times sum |d|.
_TOLERANCE = 1e-12
RESAMPLES = 100_000  # sign vectors: two standard errors of a p-value of 0.05 are then about 0.0014
BOOTSTRAPS = 10_000  # resamples of an interval, whose ends need only two digits
LEVEL = 0.05  # p-values below it are called significant


@dataclass(frozen=True)
class PairedComparison:
    """The comparison of two systems on the same queries: system minus baseline, in the measure's unit (0-1)."""

    difference: float  # mean over queries
    low: float  # bounds of the 95% bootstrap confidence interval of the mean difference
    high: float
    p_permutation: float  # two-sided p-value; assumes that equal systems could exchange their values of each query
    p_t: float | None  # two-sided p-value of the paired t-test; assumes a normally distributed mean difference
    queries: int
    t: float | None  # statistic of the t-test; t and p_t are None if all differences are equal
    wins: int = 0  # queries on which the system is better
    losses: int = 0  # queries on which the system is worse

    @property
    def equal(self) -> bool:
        """Return whether all queries have equal values, so that there is nothing to test."""
        return not self.wins and not self.losses

    @property
    def ties(self) -> int:
        return self.queries - self.wins - self.losses

    @property
    def cells(self) -> list[str]:
        """The difference and its interval, as cells of a table."""
        return [f"{self.difference:+.4f}", f"{self.low:+.4f} to {self.high:+.4f}"]


def paired_comparison(
    baseline: Mapping[str, float], system: Mapping[str, float], seed: int, resamples: int = RESAMPLES
) -> PairedComparison:
    """Compare two systems by their values per query, such as `Evaluation.per_query["nDCG@10"]`.

    The permutation test flips the signs of the differences at random (in all ways, if `resamples` allows it). The
    interval is the percentile bootstrap over queries. Results depend on the seed, but not on the order of the dicts.

    Args:
        baseline: query id -> value of the baseline.
        system: query id -> value of the system.
        seed: seed of the test and of the bootstrap.
        resamples: largest number of sign vectors and of bootstrap samples.

    Raises:
        ValueError: the systems have different queries or fewer than two, or a value is not finite.
    """
    if baseline.keys() != system.keys():
        odd = sorted(baseline.keys() ^ system.keys())
        raise ValueError(
            f"{len(odd)} queries have a value in one system only (such as {odd[0]!r}); evaluate both with the same "
            "judgements"
        )
    order = sorted(baseline)
    baseline_values = np.array([baseline[query_id] for query_id in order])  # [Q]
    system_values = np.array([system[query_id] for query_id in order])  # [Q]
    differences = system_values - baseline_values
    if len(differences) < 2:
        raise ValueError(f"a paired test needs two queries or more, and there are {len(differences)}")
    if not np.isfinite(differences).all():
        raise ValueError("a value per query is not finite; evaluate the runs again")
    differences[np.abs(differences) < _TOLERANCE] = 0.0  # means over seeds of equal values differ in their last bits

    permutation_rng, bootstrap_rng = np.random.default_rng(seed).spawn(2)
    bootstrap = stats.bootstrap(
        (differences,),
        np.mean,
        method="percentile",
        confidence_level=0.95,
        n_resamples=min(resamples, BOOTSTRAPS),
        batch=_rows_at_once(differences),
        rng=bootstrap_rng,
    )
    t, p_t = paired_t(differences)
    low, high = map(float, bootstrap.confidence_interval)
    return PairedComparison(
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_permutation=randomization(differences, resamples, permutation_rng),
        p_t=p_t,
        queries=len(differences),
        t=t,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
    )


def paired_t(differences: np.ndarray) -> tuple[float | None, float | None]:
    """Return the statistic and two-sided p-value of the paired t-test; (None, None) if all differences are equal."""
    if np.ptp(differences) < _TOLERANCE:
        return None, None
    t = float(differences.mean() / differences.std(ddof=1) * np.sqrt(len(differences)))
    return t, float(2 * stats.t.sf(abs(t), len(differences) - 1))


def randomization(differences: np.ndarray, resamples: int, rng: np.random.Generator) -> float:
    """Return the two-sided p-value of Fisher's randomization test: the share of sign vectors for which |sum of
    differences| is at least the observed value.

    All sign vectors are tried if there are at most `resamples`. Otherwise this number of vectors is drawn, and the
    observed one is added. scipy's permutation_test computes the same, but takes minutes for thousands of queries.
    """
    count, total = len(differences), float(differences.sum())
    least = abs(total) - _TOLERANCE * float(np.abs(differences).sum())
    exact = 2**count <= resamples
    vectors, step, extremes = 2**count if exact else resamples, _rows_at_once(differences), 0
    for start in range(0, vectors, step):
        rows = min(step, vectors - start)
        if exact:
            bits: np.ndarray = (np.arange(start, start + rows)[:, None] >> np.arange(count)) & 1
        else:  # random bits are drawn in whole words, so that they do not depend on the number of rows at a time
            words = rng.integers(0, 2**64, (rows, -(-count // 64)), np.uint64)
            bits = np.unpackbits(words.view(np.uint8), axis=1)[:, :count]
        extremes += int((np.abs(total - 2 * (bits.astype(np.float64) @ differences)) >= least).sum())
    return extremes / vectors if exact else (1 + extremes) / (1 + vectors)


def _rows_at_once(differences: np.ndarray) -> int:
    return max(1, _NUMBERS_AT_ONCE // len(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979), which limits the probability of a false positive.

    In ascending order, each p-value is multiplied by the number of tests that are not adjusted yet; the result is at
    least the previous result, and at most 1.

    Example:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    results, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        results[index] = highest
    return results


def welch_p_value(baseline: Sequence[float], system: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Welch's t-test between means of runs (seeds): it tests the methods, not their
    models. None if one system has fewer than two runs, or if the runs of each system are equal."""
    if min(len(baseline), len(system)) < 2 or max(np.ptp(baseline), np.ptp(system)) < _TOLERANCE:
        return None
    # Computed from moments, because scipy warns if the runs of one system are equal, although Welch's test is then
    # defined.
    moments = ((np.mean(runs), np.std(runs, ddof=1), len(runs)) for runs in (system, baseline))
    (mean, deviation, count), (other_mean, other_deviation, other_count) = moments
    test = stats.ttest_ind_from_stats(mean, deviation, count, other_mean, other_deviation, other_count, equal_var=False)
    return float(test.pvalue)
