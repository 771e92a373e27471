"""Do several vectors of a passage say different things? Local variation and perplexity (MVR, section 5.2), and which
layer or viewer wins the maximum (MLR, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

NORMS = ("softmax", "cosine", "none")
EQUAL = 1e-5  # of 1 - cos; float32 encoders leave up to about 1e-6 between vectors that are the same


@dataclass(frozen=True)
class Diversity:
    """local_variation: mean over queries of (best score of the relevant passage's vectors - mean of the others), of
    scores normed as named. perplexity: exp of the entropy (natural logarithm) of which vector wins, over the queries of
    a passage, averaged over passages with at least two; None if there is none. wins: how often each vector wins [V].
    distance: 1 - cos of two vectors of a passage, the mean over all pairs of them and all passages."""

    pairs: int
    passages: int  # with at least two queries
    distance: float
    local_variation: dict[str, float]
    perplexity: float | None
    wins: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether the vectors of a passage are one vector but for rounding: which of them wins then means nothing."""
        return self.distance < EQUAL


def normed(
    queries: Float[np.ndarray, "P D"], vectors: Float[np.ndarray, "P V D"], norm: str
) -> Float[np.ndarray, "P V"]:
    """Scores of each query with each of its passage's vectors, float64. The paper does not say how it norms them:
    softmax over the vectors (which its numbers fit), cosine, or none."""
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; it must be one of {', '.join(NORMS)}")
    wide, others = queries.astype(np.float64), vectors.astype(np.float64)
    scores = np.einsum("pd,pvd->pv", wide, others)
    if norm == "cosine":
        lengths = np.linalg.norm(wide, axis=-1)[:, None] * np.linalg.norm(others, axis=-1)
        return scores / np.maximum(lengths, 1e-30)
    if norm == "softmax":
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)
    return scores


def local_variation(scores: Float[np.ndarray, "P V"]) -> float:
    """Mean over pairs of the best score minus the mean of the others (MVR eq. 9)."""
    best = scores.max(axis=1)
    return float((best - (scores.sum(axis=1) - best) / (scores.shape[1] - 1)).mean())


def mean_distance(vectors: Float[np.ndarray, "P V D"]) -> float:
    """1 - cos of two different vectors of a passage, averaged."""
    unit = vectors.astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=-1, keepdims=True), 1e-30)
    count = unit.shape[1]
    squares = (unit.sum(axis=1) ** 2).sum(axis=-1)  # |sum of unit vectors|^2 = V + the cosines of all pairs
    return float(1 - ((squares - count) / (count * (count - 1))).mean())


def perplexity(winners: np.ndarray, passages: np.ndarray) -> tuple[float | None, int]:
    """(exp of the entropy of `winners` [P] among the pairs of each passage [P], averaged; passages with two pairs)."""
    found = []
    for passage in np.unique(passages):
        chosen = winners[passages == passage]
        if len(chosen) >= 2:
            shares = np.unique(chosen, return_counts=True)[1] / len(chosen)
            found.append(float(np.exp(-(shares * np.log(shares)).sum())))
    return (float(np.mean(found)) if found else None), len(found)


def diversity(
    queries: Float[np.ndarray, "P D"], vectors: Float[np.ndarray, "P V D"], passages: np.ndarray
) -> Diversity:
    """Of P pairs of a query and a relevant passage: the query's vector, the passage's V vectors and its number [P].

    Raises ValueError if there is no pair, or only one vector. Of equal scores the first vector wins.
    """
    if len(queries) == 0 or vectors.shape[1] < 2:
        raise ValueError(
            f"{len(queries)} pairs with {vectors.shape[1]} vectors: at least 1 pair and 2 vectors are needed"
        )
    winners = np.einsum("pd,pvd->pv", queries.astype(np.float64), vectors.astype(np.float64)).argmax(axis=1)
    mean, counted = perplexity(winners, passages)
    return Diversity(
        pairs=len(queries),
        passages=counted,
        distance=mean_distance(vectors),
        local_variation={norm: local_variation(normed(queries, vectors, norm)) for norm in NORMS},
        perplexity=mean,
        wins=tuple(np.bincount(winners, minlength=vectors.shape[1]).tolist()),
    )
