"""Queries, as exact search uses them: one vector each (`single_vector.py`), lists of vectors (`multi_vector.py`) or
weights of words (`inverted_lists.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.select import Backend


@runtime_checkable
class ScoredQueries(Protocol):
    """Queries of one kind, and how passages of that kind are scored exactly."""

    norms: np.ndarray  # upper bounds of the norms of all their vectors, query by query
    pairs_a_thread: int  # (query, passage) pairs to give to `scores`, at least

    def __len__(self) -> int: ...
    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        """Return the vectors of a query, float64 [U,D]."""
        ...

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        """Return an upper bound of the error of a score with this unit roundoff, for each query, float64 [Q]."""
        ...

    def scores(self, queries: np.ndarray, shard: Any, rows: np.ndarray) -> np.ndarray:
        """Return scores of (query, row of the shard) pairs, float64 [P]; the pairs of a query lie together."""
        ...

    def take(self, part: np.ndarray) -> ScoredQueries: ...
    def every_score(self, shard: Any, start: int, stop: int) -> np.ndarray:
        """Return the scores of all queries with rows `start` to `stop` (excluded) of a shard, float64 [Q,rows]."""
        ...


@runtime_checkable
class QueryVectors(ScoredQueries, Protocol):
    """Queries as vectors, in the form that backends search with."""

    def owner(self, vector: int) -> int: ...

    def take(self, part: np.ndarray) -> QueryVectors: ...
    def parts(self) -> list[tuple[slice, Any]]:
        """Return the queries a few at a time, as a backend takes them."""
        ...

    def blocks(
        self, shard: Any, total_rows: int, depth: int, backend: Backend
    ) -> Iterator[tuple[np.ndarray, np.ndarray | PaddedLists, np.ndarray]]:
        """Yield (rows of the shard, their vectors as a backend takes them, upper bounds of the rows' largest norms).

        Args:
            shard: vectors of a shard.
            total_rows: of the corpus.
            depth: candidates that each query needs.
            backend: limits the size of a block.
        """
        ...
