"""Measure how different the vectors of a passage are: local variation and perplexity (MVR, section 5.2), and how often
each layer or viewer has the highest score (MLR, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

NORMS = ("softmax", "cosine", "none")
EQUAL = 1e-5  # tolerance of 1 - cos; float32 encoders leave up to about 1e-6 between vectors that are the same


@dataclass(frozen=True)
class Diversity:
    """Diversity of passage vectors over pairs of query and relevant passage; the vector of the largest score wins."""

    pairs: int  # number of pairs
    passages: int  # number of passages with at least two queries
    distance: float  # 1 - cos of two vectors of a passage, averaged over all pairs of vectors and all passages
    # normalization (NORMS) -> mean over pairs of the best score minus the mean of the other scores
    local_variation: dict[str, float]
    # exp of the entropy (natural logarithm) of the winners among the queries of a passage, averaged over passages with
    # at least two queries; None if no passage has two
    perplexity: float | None
    wins: tuple[int, ...]  # number of pairs that each vector wins, [V]

    @property
    def equal(self) -> bool:
        """Whether the vectors of a passage are equal except for rounding: the winner then has no meaning."""
        return self.distance < EQUAL


def normalized_scores(
    queries: Float[np.ndarray, "P D"], vectors: Float[np.ndarray, "P V D"], norm: str
) -> Float[np.ndarray, "P V"]:
    """Return the scores of each query with each vector of its passage, float64.

    `norm` is the normalization, which the paper does not state: softmax over the vectors (which fits its numbers),
    cosine, or none.
    """
    wide_queries, wide_vectors = queries.astype(np.float64), vectors.astype(np.float64)
    scores = np.einsum("pd,pvd->pv", wide_queries, wide_vectors)
    if norm == "cosine":
        lengths = np.linalg.norm(wide_queries, axis=-1)[:, None] * np.linalg.norm(wide_vectors, axis=-1)
        return scores / np.maximum(lengths, 1e-30)
    if norm == "softmax":
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)
    return scores


def local_variation(scores: Float[np.ndarray, "P V"]) -> float:
    """Return the mean over pairs of the best score minus the mean of the other scores (MVR eq. 9)."""
    best = scores.max(axis=1)
    return float((best - (scores.sum(axis=1) - best) / (scores.shape[1] - 1)).mean())


def mean_distance(vectors: Float[np.ndarray, "P V D"]) -> float:
    """Return 1 - cos of two different vectors of a passage, averaged over pairs of vectors and passages."""
    unit = vectors.astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=-1, keepdims=True), 1e-30)
    count = unit.shape[1]
    squares = (unit.sum(axis=1) ** 2).sum(axis=-1)  # |sum of unit vectors|^2 = V + the cosines of all pairs
    return float(1 - ((squares - count) / (count * (count - 1))).mean())


def perplexity(winners: np.ndarray, passages: np.ndarray) -> tuple[float | None, int]:
    """Return (mean over passages of exp of the entropy of their `winners`, number of passages with two pairs or more).

    winners, passages: of each pair, [P]. The mean is None if no passage has two pairs.
    """
    perplexities = []
    order = np.argsort(passages, kind="stable")  # a scan of all pairs for each passage would take hours for millions
    borders = np.flatnonzero(np.diff(passages[order])) + 1
    for wins in np.split(winners[order], borders):
        if len(wins) >= 2:
            shares = np.unique(wins, return_counts=True)[1] / len(wins)
            perplexities.append(float(np.exp(-(shares * np.log(shares)).sum())))
    return (float(np.mean(perplexities)) if perplexities else None), len(perplexities)


def diversity(
    queries: Float[np.ndarray, "P D"], vectors: Float[np.ndarray, "P V D"], passages: np.ndarray
) -> Diversity:
    """Return the diversity of P pairs of a query and a relevant passage. Of vectors with equal scores, the first wins.

    `passages` has a number for each pair, which is equal for pairs of the same passage [P]. There is a pair, and a
    passage has two vectors or more.
    """
    winners = np.einsum("pd,pvd->pv", queries.astype(np.float64), vectors.astype(np.float64)).argmax(axis=1)
    mean, count = perplexity(winners, passages)
    return Diversity(
        pairs=len(queries),
        passages=count,
        distance=mean_distance(vectors),
        local_variation={norm: local_variation(normalized_scores(queries, vectors, norm)) for norm in NORMS},
        perplexity=mean,
        wins=tuple(np.bincount(winners, minlength=vectors.shape[1]).tolist()),
    )
