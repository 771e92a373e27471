"""One vector a query, V vectors a document: the highest product counts. For `search.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from jaxret.retrieval.backends import Backend
from jaxret.retrieval.picked import Picked
from jaxret.retrieval.rounding import UNIT, rounding_error, upper_norms

BLOCK_ROWS = 65_536  # vectors multiplied at a time: smaller blocks leave BLAS idle, larger ones only cost memory
QUERY_ROWS = 1024  # queries multiplied at a time: 1024 x 65,536 scores are 256 MiB
WHOLE_ROWS = 2**20  # or so many, where a backend cuts them itself and they need not be copied


class SingleVectors:
    """Queries [Q,D] float32 on shards [rows,V,D]."""

    pairs_at_once = 8192  # fewer hold threads up that wait for the interpreter

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors
        self._wide = vectors.astype(np.float64)
        self.norms = upper_norms(vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        return self._wide[i][None]

    def owner(self, vector: int) -> int:
        return vector

    def take(self, part: np.ndarray) -> SingleVectors:
        return SingleVectors(self.vectors[part])

    def parts(self) -> list[tuple[slice, np.ndarray]]:
        starts = range(0, len(self), QUERY_ROWS)
        return [(slice(start, start + QUERY_ROWS), self.vectors[start : start + QUERY_ROWS]) for start in starts]

    def blocks(
        self, shard: np.ndarray | Picked, total_rows: int, depth: int, backend: Backend
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        n_vectors, dimension = shard.shape[1:]
        size = block_documents(total_rows, n_vectors, depth, backend)
        if backend.max_rows is None and isinstance(shard, np.ndarray) and shard.dtype == np.float32:
            size = max(1, WHOLE_ROWS // n_vectors)
        for start in range(0, len(shard), size):
            block = np.ascontiguousarray(shard[start : start + size], np.float32)
            norms = upper_norms(block.reshape(-1, dimension)).reshape(-1, n_vectors)
            yield np.arange(start, start + len(block)), block, norms.max(axis=1)  # a NaN wins

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        return rounding_error(self.vectors.shape[1], self.norms, largest_norm) * (unit / UNIT)

    def scores(self, queries: np.ndarray, shard: np.ndarray | Picked, rows: np.ndarray) -> np.ndarray:
        found = np.empty(len(rows))
        for start, stop in of_one_query(queries):  # which is read once
            vectors = np.asarray(shard[rows[start:stop]], np.float64)  # [P,V,D]
            np.max(np.vecdot(vectors, self._wide[queries[start]]), axis=1, out=found[start:stop])
        return found


def of_one_query(queries: np.ndarray) -> Iterator[tuple[int, int]]:
    """(begin, end) of the (query, row) pairs of each query; these lie together."""
    ends = np.flatnonzero(queries[1:] != queries[:-1]) + 1
    return pairwise([0, *ends.tolist(), len(queries)])


def block_documents(total_rows: int, n_vectors: int, depth: int, backend: Backend) -> int:
    """Documents to give the backend at a time: few enough that what it may return of each block adds up to depth."""
    rows = BLOCK_ROWS
    if backend.max_rows is not None:
        if n_vectors > backend.max_rows:
            raise ValueError(
                f"{n_vectors} vectors a document are more than the {backend.max_rows} that {backend.name} can return: "
                "choose faiss-cpu or xla"
            )
        rows = min(rows, total_rows * n_vectors)  # so that all depths which need no smaller block have the same
        rows = min(rows, max(backend.max_rows, rows * backend.max_rows // (depth * n_vectors)))
    return max(1, rows // n_vectors)
