"""Approximate search of many vectors a passage: the N passages that one vector each ranks highest (`fronts.py`), scored
exactly. What is found has exact scores; what is no candidate is missed, and `compared` says how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxret.retrieval.backends import Backend
from jaxret.retrieval.dense import SingleVectors
from jaxret.retrieval.fronts import FRONTS, Front, queries_of
from jaxret.retrieval.kept import Kept, Stored, keep, require_finite
from jaxret.retrieval.picked import Picked
from jaxret.retrieval.proof import PASS_CANDIDATES, SearchResult, recall_at
from jaxret.retrieval.rounding import upper_norms
from jaxret.retrieval.search import find_candidates, query_vectors, score_candidates, search
from jaxret.types import Ragged

FRONT_BYTES = 2**26  # of the vectors of a front that are made at a time
SAMPLE = 50  # queries, evenly spread, that are searched exactly too


class Wanted(NamedTuple):
    """What `--candidates` says: which front, and how many passages of it are scored exactly."""

    front: str
    passages: int

    def __str__(self) -> str:
        return f"{self.front}:{self.passages}"

    def require(self, k: int) -> None:
        """Raises ValueError if k passages are more than are proposed."""
        if self.passages < k:
            raise ValueError(f"--candidates={self} proposes fewer passages than the {k} that are asked for")


def read_wanted(text: str) -> Wanted:
    """`mean:1000`. Raises ValueError for anything else."""
    front, _, count = text.partition(":")
    if front not in FRONTS or not count.isdecimal() or int(count) < 1:
        known = ", ".join(f"{name}:1000" for name in FRONTS)
        raise ValueError(f"--candidates is {text!r}; it must be a front and how many passages it proposes: {known}")
    return Wanted(front, int(count))


class FrontShard(Picked):
    """The passages `rows` of a shard by the vectors of a front, [rows,1,size]; made when they are asked for."""

    def __init__(self, of: FrontCorpus, first: int, shard: Any, rows: np.ndarray) -> None:
        self._of, self._first, self._shard, self._rows = of, first, shard, rows
        self.shape = (len(rows), 1, of.dimension)

    def __getitem__(self, key: Any) -> np.ndarray:
        rows = self._rows[key]
        found = np.empty((len(rows), 1, self._of.dimension), np.float32)
        for place, row in enumerate(rows.tolist()):
            vectors = np.asarray(self._shard[row], np.float32)
            self._of.seen(self._first + row, vectors)
            found[place, 0] = self._of.front.passage(vectors)
        return found


class FrontCorpus:
    """A corpus as a front sees it, one vector a passage. largest_norm: of any vector of the passages that were read."""

    def __init__(self, corpus: Stored, front: Front) -> None:
        self.front, self.dimension, self.total_rows, self.ragged = front, front.size, corpus.total_rows, False
        self.describe, self.ids = corpus.describe, corpus.ids
        self.largest_norm = 0.0
        self._corpus = corpus

    def seen(self, row: int, vectors: np.ndarray) -> None:
        norms = upper_norms(vectors).max(keepdims=True)  # a NaN wins
        require_finite(self, np.array([row]), norms)
        self.largest_norm = max(self.largest_norm, float(norms[0]))

    def __iter__(self) -> Iterator[tuple[int, FrontShard]]:
        size = max(1, FRONT_BYTES // (4 * self.dimension))
        for first, shard in self._corpus:
            for start in range(0, len(shard), size):
                rows = np.arange(start, min(start + size, len(shard)))
                yield first + start, FrontShard(self, first, shard, rows)


@dataclass(frozen=True)
class Proposer:
    """Candidates of a corpus by a front, ready for many searches: in memory where there is room (`kept.py`)."""

    wanted: Wanted
    corpus: FrontCorpus
    there: Kept | Stored
    backend: Backend

    @classmethod
    def open(cls, corpus: Stored, wanted: Wanted, backend: Backend, many: bool = False) -> Proposer:
        """Raises ValueError where passages have one vector: that search is exact as it is."""
        if not corpus.ragged and next(iter(corpus))[1].shape[1] == 1:
            raise ValueError(
                f"--candidates={wanted} is for passages of several vectors; here each has one: leave it out"
            )
        seen = FrontCorpus(corpus, FRONTS[wanted.front].of(corpus.dimension))
        return cls(wanted, seen, keep(seen) if many else seen, backend)

    @property
    def count(self) -> int:
        """How many candidates a query has."""
        return min(self.wanted.passages, self.corpus.total_rows)

    @property
    def description(self) -> str:
        """One line: the backend, and what it ranks."""
        return f"{self.backend.description}, {self.count:,} candidates a query by {self.wanted.front}"

    def __call__(self, vectors: Ragged, corpus: Stored, k: int, progress: bool = False) -> SearchResult:
        """The best k of the candidates of each query, by exact scores, then by row. corpus: the same passages."""
        self.wanted.require(k)
        count = self.count
        at_once = max(1, PASS_CANDIDATES // count)
        starts = range(0, len(vectors), at_once)
        found = [
            self._some(vectors.part(start, min(start + at_once, len(vectors))), corpus, count, progress)
            for start in starts
        ]
        scores, rows = (np.concatenate(parts)[:, :k] for parts in zip(*found, strict=True))
        return SearchResult(scores, rows, self.description, (len(vectors),), len(vectors) * count)

    def _some(self, vectors: Ragged, corpus: Stored, count: int, progress: bool) -> tuple[np.ndarray, np.ndarray]:
        asked = query_vectors(vectors, corpus)
        proposed = SingleVectors(queries_of(self.corpus.front, vectors))
        candidates, _ = find_candidates(proposed, self.there, count, self.backend, progress)
        return score_candidates(asked, candidates.rows, corpus, count, self.corpus.largest_norm)


def compared(wanted: Wanted, found: SearchResult, vectors: Ragged, corpus: Stored, backend: Backend) -> dict[str, Any]:
    """What was missed, as JSON: some of the queries, given as their vectors, are searched exactly, and R@d is the share
    of the best d passages of that search which are among the best d that were found."""
    some = np.unique(np.linspace(0, len(vectors) - 1, min(SAMPLE, len(vectors))).astype(np.int64))
    k = found.rows.shape[1]
    exact = search(vectors.take(some), corpus, k, backend)
    depths = sorted({min(k, depth) for depth in (1, 10, 100, k)})
    recalls = {str(depth): recall_at(found.scores[some], exact.scores, depth) for depth in depths}
    return {"candidates": str(wanted), "recall_of_exact": recalls, "queries_compared": len(some)}


def told(missed: Mapping[str, Any]) -> str:
    recalls = ", ".join(f"R@{depth} {value:.4f}" for depth, value in missed["recall_of_exact"].items())
    return (
        f"approximate ({missed['candidates']}): of what exact search finds, {recalls} was found, "
        f"by {missed['queries_compared']:,} of the queries"
    )
