"""The interface of queries in exact search. A query is one vector (`single_vector.py`), a list of vectors
(`multi_vector.py`) or a sparse vector (`inverted_lists.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.select import Backend


@runtime_checkable
class ScoredQueries(Protocol):
    """Queries of one kind, which score passages exactly."""

    norms: np.ndarray  # upper bounds of the norms of all query vectors, in the order of the queries
    pairs_a_thread: int  # least number of (query, passage) pairs for which a thread is started

    def __len__(self) -> int: ...
    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        """Return the vectors of a query, float64 [U,D]."""
        ...

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        """Return an upper bound of the errors of each query's scores with a unit roundoff, float64 [Q]."""
        ...

    def scores(self, queries: np.ndarray, shard: Any, rows: np.ndarray) -> np.ndarray:
        """Return the scores of P pairs (query, row of the shard), float64 [P]; the pairs of a query are contiguous."""
        ...

    def take(self, part: np.ndarray) -> ScoredQueries:
        """Return some of the queries by their numbers, int64 [n]."""
        ...

    def every_score(self, shard: Any, start: int, stop: int) -> np.ndarray:
        """Return the scores of all queries with rows `start` to `stop` (excluded) of a shard, float64 [Q,rows]."""
        ...


@runtime_checkable
class QueryVectors(ScoredQueries, Protocol):
    """Queries as dense vectors, in the form that backends search with."""

    def owner(self, vector: int) -> int:
        """Return the number of the query to which a vector belongs."""
        ...

    def take(self, part: np.ndarray) -> QueryVectors:
        """Return some of the queries by their numbers, int64 [n]."""
        ...

    def parts(self) -> list[tuple[slice, Any]]:
        """Return (slice of the queries, their vectors in the form of a backend), a few queries at a time."""
        ...

    def blocks(
        self, shard: Any, total_rows: int, depth: int, backend: Backend
    ) -> Iterator[tuple[np.ndarray, np.ndarray | PaddedLists, np.ndarray]]:
        """Yield (rows of the shard, their vectors in the form of a backend, upper bounds of the rows' largest norms).

        Args:
            shard: vectors of a shard.
            total_rows: passages of the corpus.
            depth: candidates that each query needs.
            backend: the backend, which may limit the size of a block.
        """
        ...
