"""Fusion of rankings: one ranking from the rankings of several systems for the same queries.

Each method gives every passage of a ranking a number. The fused score is the weighted sum of these numbers over the
rankings. A passage that a ranking lacks gets the method's `fill_value`, which is never above the number of a passage in
the ranking.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxret.data.records import Judgement, Ranking, Rankings
from jaxret.evaluation.metrics import evaluate

RANK_CONSTANT = 60  # constant of reciprocal ranks, from Cormack, Clarke and Buettcher 2009


def _min_max(scores: np.ndarray) -> np.ndarray:
    """Return scores scaled to [0, 1]; all 1 if the scores are equal."""
    low, high = scores.min(), scores.max()
    return np.ones(len(scores)) if high == low else (scores - low) / (high - low)


def _z_scores(scores: np.ndarray) -> np.ndarray:
    """Return (score - mean) / population standard deviation; all 0 if the scores are equal."""
    deviation = scores.std()
    return np.zeros(len(scores)) if deviation == 0 else (scores - scores.mean()) / deviation


# name -> function from the scores of a ranking, best first, [K] float64, to numbers to sum [K], and a function from
# these numbers to the number of a missing passage
FUSION_METHODS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], float]]] = {
    "rrf": (lambda scores: 1 / (RANK_CONSTANT + np.arange(1, len(scores) + 1)), lambda numbers: 0.0),
    "min_max": (_min_max, lambda numbers: 0.0),
    # Not 0, the mean: then a missing passage would beat every retrieved passage below the mean.
    "z_score": (_z_scores, lambda numbers: float(numbers.min())),
}


def fuse(runs: Sequence[Rankings], method: str, weights: Sequence[float] | None = None, k: int = 1000) -> Rankings:
    """Return one ranking for each query that any of the runs has.

    Equal fused scores are ordered by the passage's rank in the first run, then in the second, and so on.

    Args:
        runs: the rankings of each system.
        method: a name of FUSION_METHODS: "rrf" (reciprocal ranks), "min_max" or "z_score".
        weights: weights of the runs; 1 each by default.
        k: passages of a query that are kept.

    Raises:
        ValueError: the method is unknown, or there is not one weight for each run.

    Example:
        >>> words, vectors = {"q": [("a", 9.0), ("b", 4.0)]}, {"q": [("b", 0.8), ("c", 0.6)]}
        >>> fuse([words, vectors], "min_max", weights=[0.3, 0.7])
        {'q': [('b', 0.7), ('a', 0.3), ('c', 0.0)]}
    """
    if method not in FUSION_METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(FUSION_METHODS)}")
    weights = [1.0] * len(runs) if weights is None else list(weights)
    if len(weights) != len(runs):
        raise ValueError(f"there are {len(weights)} weights for {len(runs)} runs; give one for each")
    queries = dict.fromkeys(query for run in runs for query in run)
    rankings = {query: [run.get(query, []) for run in runs] for query in queries}
    return {query: _fuse_query(lists, method, weights, k) for query, lists in rankings.items()}


def _fuse_query(lists: Sequence[Ranking], method: str, weights: Sequence[float], k: int) -> list[tuple[str, float]]:
    transform, fill_value = FUSION_METHODS[method]
    passages = list(dict.fromkeys(passage for ranking in lists for passage, _ in ranking))  # the order of ties
    numbers, last = np.zeros((len(lists), len(passages))), len(passages)
    ranks = np.full((len(lists), len(passages)), last)
    row_of = {passage: row for row, passage in enumerate(passages)}
    for index, ranking in enumerate(lists):
        if not ranking:
            continue
        rows = [row_of[passage] for passage, _ in ranking]
        values = transform(np.array([score for _, score in ranking], np.float64))
        numbers[index] = fill_value(values)
        numbers[index, rows] = values
        ranks[index, rows] = np.arange(len(ranking))
    sums = np.asarray(weights, np.float64) @ numbers
    order = np.lexsort([*ranks[::-1], -sums])[:k]
    return [(passages[row], float(sums[row])) for row in order]


def tune_weights(
    runs: Sequence[Rankings], judgements: Sequence[Judgement], measure: str, method: str
) -> tuple[tuple[float, ...], float]:
    """Return the weights with the best value of a measure, and that value.

    The weights are those of `weights_to_try`; of equal values, the most even weights win.

    Args:
        runs: rankings of queries that are not those of the evaluation.
        judgements: judgements of the same queries.
        measure: a name such as "nDCG@10".
        method: a name of FUSION_METHODS.
    """
    values = {
        weights: evaluate(fuse(runs, method, weights), judgements, [measure]).mean[measure]
        for weights in weights_to_try(len(runs))
    }
    return best_weights(values)


def best_weights(values: Mapping[tuple[float, ...], float]) -> tuple[tuple[float, ...], float]:
    """Return the weights with the best value, and that value; of equal values, the most even weights win."""
    best = max(values, key=lambda weights: (round(values[weights], 12), -max(weights)))
    return best, values[best]


def weights_to_try(count: int) -> Iterator[tuple[float, ...]]:
    """Yield all `count` non-negative multiples of 0.05 that sum to 1."""
    parts = 20
    for cuts in itertools.combinations(range(parts + count - 1), count - 1):
        edges = (-1, *cuts, parts + count - 1)
        yield tuple((right - left - 1) / parts for left, right in itertools.pairwise(edges))
