"""Exact fusion of systems that can score every passage: a weighted sum of the scores of all systems, proven complete.

Fusion of rankings has to guess the score of a passage that a ranking lacks. Here every system scores every candidate,
and the result has the k best sums of the whole corpus. The sum of a passage that no system has among its first n
passages is at most the weighted sum of the systems' n-th scores. n grows until the k-th sum is above this bound (the
threshold algorithm of Fagin, Lotem and Naor 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxret.data.records import Query, Rankings
from jaxret.search.bm25 import BM25
from jaxret.search.searcher import Searcher


class TopRows(NamedTuple):
    """The best passages of a query, ordered by descending score, then by ascending row."""

    rows: np.ndarray  # [K] int64
    scores: np.ndarray  # [K] float64


@runtime_checkable
class ScoringSystem(Protocol):
    """A system that ranks a corpus and scores any of its passages. Row i is the i-th passage of the corpus."""

    def __len__(self) -> int:
        """Return the number of passages."""
        ...

    def ids(self, rows: np.ndarray) -> list[str]:
        """Return the ids of passages."""
        ...

    def top(self, query: Query, k: int) -> TopRows:
        """Return the k best passages. All others score at most as the last one, or 0 if fewer are returned."""
        ...

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        """Return the scores of passages, [rows] float64."""
        ...


class BM25System:
    """The scoring system of a BM25 index."""

    def __init__(self, index: BM25) -> None:
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def ids(self, rows: np.ndarray) -> list[str]:
        return self.index.ids(rows)

    def top(self, query: Query, k: int) -> TopRows:
        (words,) = self.index.words([query])
        rows, scores = self.index.top_rows(words, k)
        return TopRows(rows, scores.astype(np.float64))

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        (words,) = self.index.words([query])
        return self.index.all_scores(words)[rows].astype(np.float64)


class DenseSystem:
    """The scoring system of a run and its encoded corpus."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher

    def __len__(self) -> int:
        return self.searcher.encoded_corpus.total_rows

    def ids(self, rows: np.ndarray) -> list[str]:
        return self.searcher.encoded_corpus.ids(rows)

    def top(self, query: Query, k: int) -> TopRows:
        result, _ = self.searcher.nearest(self.searcher.encode([query])[1], min(k, len(self)))
        return TopRows(result.rows[0].astype(np.int64), result.scores[0].astype(np.float64))

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        (scores,) = self.searcher.scores(self.searcher.encode([query])[1], [rows.tolist()])
        return np.array(scores, np.float64)


class SystemWithoutSelfMatches:
    """A system without self-matches: the passage with the query's id is not a candidate, and does not count in
    scales."""

    def __init__(self, system: ScoringSystem) -> None:
        self.system = system

    def __len__(self) -> int:
        return len(self.system)

    def ids(self, rows: np.ndarray) -> list[str]:
        return self.system.ids(rows)

    def top(self, query: Query, k: int) -> TopRows:
        rows, scores = self.system.top(query, k + 1)
        different = np.array([key != query.id for key in self.ids(rows)], bool)
        return TopRows(rows[different][:k], scores[different][:k])

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        return self.system.scores_of(query, rows)


class CachedSystem:
    """A system that caches its scores, because fusions with other weights need the same scores."""

    def __init__(self, system: ScoringSystem) -> None:
        self.system = system
        self._tops: dict[tuple[str, int], TopRows] = {}
        self._scores: dict[tuple[str, bytes], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.system)

    def ids(self, rows: np.ndarray) -> list[str]:
        return self.system.ids(rows)

    def top(self, query: Query, k: int) -> TopRows:
        key = (query.id, k)
        if key not in self._tops:
            self._tops[key] = self.system.top(query, k)
        return self._tops[key]

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        key = (query.id, rows.tobytes())
        if key not in self._scores:
            self._scores[key] = self.system.scores_of(query, rows)
        return self._scores[key]


class Scale(NamedTuple):
    """The function (score - offset) * factor, which makes scores of systems comparable."""

    offset: float
    factor: float

    def __call__(self, scores: np.ndarray | float) -> np.ndarray:
        return np.asarray((np.asarray(scores, np.float64) - self.offset) * self.factor)


def _min_max_scale(scores: np.ndarray) -> Scale:
    low, high = float(scores.min()), float(scores.max())
    return Scale(low, 1 / (high - low) if high > low else 1.0)


def _z_score_scale(scores: np.ndarray) -> Scale:
    deviation = float(scores.std())
    return Scale(float(scores.mean()), 1 / deviation if deviation else 1.0)


# Functions that return the scale of a system from the scores of its first `ExactFusion.depth` passages.
SCALES: dict[str, Callable[[np.ndarray], Scale]] = {
    "min_max": _min_max_scale,
    "z_score": _z_score_scale,
    "sum": lambda scores: Scale(0.0, 1.0),
}


@dataclass(frozen=True)
class ExactFusion:
    """A method and weights of the fusion of systems.

    Attributes:
        method: a name of SCALES. The scale is computed from the first `depth` passages of a system for a query. The
            same scale applies to the scores of other passages, which may become negative.
        weights: one weight for each system, 0 or more.
        depth: number of first passages of a system. The scale is computed from them. The search begins with these
            passages (at least k) as candidates.
    """

    method: str
    weights: tuple[float, ...]
    depth: int = 1000

    def __post_init__(self) -> None:
        if self.method not in SCALES:
            raise ValueError(f"method is {self.method!r}; for folders of systems it must be one of {', '.join(SCALES)}")
        if min(self.weights) < 0:
            raise ValueError(f"weights are {self.weights}; no weight may be below 0")

    def __call__(self, systems: Sequence[ScoringSystem], queries: Sequence[Query], k: int) -> Rankings:
        """Return the k passages with the highest sums for each query; passages with equal sums are sorted by row.

        Raises:
            ValueError: the systems have different numbers of passages, or the number of weights differs.
        """
        sizes = {len(system) for system in systems}
        if len(sizes) > 1 or len(systems) != len(self.weights):
            raise ValueError(
                f"{len(systems)} systems of {sorted(sizes)} passages cannot be fused with {len(self.weights)} weights"
            )
        return {query.id: self._fuse(systems, query, k) for query in queries}

    def _fuse(self, systems: Sequence[ScoringSystem], query: Query, k: int) -> list[tuple[str, float]]:
        size, depth = len(systems[0]), max(self.depth, k)
        tops = [system.top(query, depth) for system in systems]
        scales = [SCALES[self.method](top.scores[: self.depth]) if len(top.scores) else Scale(0, 1) for top in tops]
        while True:
            rows = np.unique(np.concatenate([top.rows for top in tops]))
            sums, bound = np.zeros(len(rows)), 0.0
            for system, top, scale, weight in zip(systems, tops, scales, self.weights, strict=True):
                sums += weight * scale(system.scores_of(query, rows))
                bound += float(weight * scale(top.scores[-1] if len(top.scores) == depth else 0.0))
            order = np.argsort(-sums, kind="stable")[:k]
            if len(rows) == size or (len(order) == k and sums[order[-1]] > bound) or depth >= size:
                ids = systems[0].ids(rows[order])
                return list(zip(ids, sums[order].tolist(), strict=True))
            depth = min(2 * depth, size)
            tops = [system.top(query, depth) for system in systems]
