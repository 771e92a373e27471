"""Is one system better than another, or were these queries kind to it? Paired tests over values per query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Bounds the memory of a test: how many numbers are drawn at a time (64 MB as float64).
_NUMBERS_AT_ONCE = 2**23


@dataclass(frozen=True)
class Comparison:
    """`system` minus `baseline` on the same queries, in the measure's unit (0-1)."""

    difference: float  # mean
    low: float  # bounds of the mean difference's bootstrap confidence interval
    high: float
    p_permutation: float  # two-sided; assumes only that under no difference the two systems could swap each query
    p_t: float  # two-sided paired t-test; assumes that the mean difference is normally distributed
    queries: int


def compare(
    baseline: Mapping[str, float],
    system: Mapping[str, float],
    seed: int,
    resamples: int = 10_000,  # a p-value of 0.05 is then known to about 0.004 (two standard errors)
    confidence: float = 0.95,
) -> Comparison:
    """Compares two systems by their values per query, such as `Evaluation.per_query["nDCG@10"]`.

    The permutation test flips the signs of the differences at random (all sign vectors, if `resamples` allows); the
    interval is the percentile bootstrap over queries. The same seed gives the same numbers, whatever the dicts' order.

    Raises:
        ValueError: the systems have different queries, there are fewer than two, or a value is not finite.
    """
    if baseline.keys() != system.keys():
        odd = sorted(baseline.keys() ^ system.keys())
        raise ValueError(
            f"{len(odd)} queries have a value in one system only (such as {odd[0]!r}); evaluate both with the same "
            "judgements"
        )
    order = sorted(baseline)
    before, after = (np.array([values[query_id] for query_id in order]) for values in (baseline, system))  # [Q]
    differences = after - before
    if len(differences) < 2:
        raise ValueError(f"a paired test needs two queries or more, and there are {len(differences)}")
    if not np.isfinite(differences).all():
        raise ValueError("a value per query is not finite; evaluate the runs again")
    if not differences.any():  # nothing to test; the t statistic would be 0 / 0
        return Comparison(0.0, 0.0, 0.0, 1.0, 1.0, len(differences))

    batch = max(1, _NUMBERS_AT_ONCE // len(differences))
    permutation_rng, bootstrap_rng = np.random.default_rng(seed).spawn(2)
    permutation = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=resamples, batch=batch, rng=permutation_rng
    )
    bootstrap = stats.bootstrap(
        (differences,),
        np.mean,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=batch,
        rng=bootstrap_rng,
    )
    p_t = stats.ttest_rel(after, before).pvalue
    low, high = map(float, bootstrap.confidence_interval)
    p_permutation = float(permutation.pvalue)
    return Comparison(float(differences.mean()), low, high, p_permutation, float(p_t), len(differences))
