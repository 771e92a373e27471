"""Scores of queries with one vector and passages with V vectors: the highest product counts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from jaxret.index.row_subset import RowSubset
from jaxret.search.backends.select import Backend
from jaxret.search.rounding import UNIT, rounding_error, upper_norms

BLOCK_ROWS = 65_536  # vectors multiplied at a time: smaller blocks leave BLAS idle, larger blocks only cost memory
QUERY_ROWS = 1024  # queries multiplied at a time: 1024 x 65,536 scores are 256 MiB
UNCOPIED_BYTES = 2**30  # bytes of a block if the backend splits blocks itself, and the rows need not be copied
# With fewer pairs for each query than this, all pairs are multiplied at once, each with a copy of its query.
FEW_PAIRS = 8
THREAD_VALUES = 2**16  # float64 values of vectors that a thread holds at a time: they stay in its L2 cache


class SingleVectors:
    """Queries [Q,D] float32, for shards [rows,V,D] (`query_vectors.QueryVectors`)."""

    pairs_a_thread = 4096  # fewer pairs take less time than OpenMP's threads stay busy after a product

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors
        self.norms = upper_norms(vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        return self.vectors[i].astype(np.float64)[None]

    def owner(self, vector: int) -> int:
        return vector

    def take(self, part: np.ndarray) -> SingleVectors:
        return SingleVectors(self.vectors[part])

    def parts(self) -> list[tuple[slice, np.ndarray]]:
        starts = range(0, len(self), QUERY_ROWS)
        return [(slice(start, start + QUERY_ROWS), self.vectors[start : start + QUERY_ROWS]) for start in starts]

    def blocks(
        self, shard: np.ndarray | RowSubset, total_rows: int, depth: int, backend: Backend
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        n_vectors, dimension = shard.shape[1:]
        size = block_passages(total_rows, n_vectors, depth, backend)
        if backend.max_rows is None and n_vectors == 1 and _is_usable_in_place(shard):
            size = max(size, UNCOPIED_BYTES // (4 * dimension))
        for start in range(0, len(shard), size):
            block = np.ascontiguousarray(shard[start : start + size], np.float32)
            norms = upper_norms(block.reshape(-1, dimension)).reshape(-1, n_vectors)
            yield np.arange(start, start + len(block)), block, norms.max(axis=1)  # NaN if one of them is NaN

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        return rounding_error(self.vectors.shape[1], self.norms, largest_norm) * (unit / UNIT)

    def scores(self, queries: np.ndarray, shard: np.ndarray | RowSubset, rows: np.ndarray) -> np.ndarray:
        result = np.empty(len(rows))
        step = max(1, THREAD_VALUES // (shard.shape[1] * shard.shape[2]))
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            row_of, query_of, best = rows[part], queries[part], result[part]
            bounds = query_spans(query_of)
            if len(bounds) > len(query_of) // FEW_PAIRS:
                vectors = shard.take(row_of, axis=0, mode="clip").astype(np.float64)  # [P,V,D]
                np.max(np.vecdot(vectors, self.vectors[query_of].astype(np.float64)[:, None]), axis=1, out=best)
                continue
            for start, stop in bounds:
                # mode="clip", because all rows exist, and the check of mode="raise" takes a fifth of the time.
                vectors = shard.take(row_of[start:stop], axis=0, mode="clip").astype(np.float64)
                np.max(np.vecdot(vectors, self[query_of[start]]), axis=1, out=best[start:stop])
        return result

    def every_score(self, shard: np.ndarray | RowSubset, start: int, stop: int) -> np.ndarray:
        block = np.asarray(shard[start:stop], np.float64)
        products = self.vectors.astype(np.float64) @ block.reshape(-1, block.shape[-1]).T
        scores: np.ndarray = products.reshape(len(self), *block.shape[:2]).max(axis=2)
        return scores


def query_spans(queries: np.ndarray) -> list[tuple[int, int]]:
    """Return (begin, end) of the pairs of each query. `queries` has the query of each pair; pairs of one query are
    contiguous."""
    ends = np.flatnonzero(queries[1:] != queries[:-1]) + 1
    return list(pairwise([0, *ends.tolist(), len(queries)]))


def _is_usable_in_place(shard: np.ndarray | RowSubset) -> bool:
    """Return whether a backend can use the rows of a shard without a copy."""
    return isinstance(shard, np.ndarray) and shard.dtype == np.float32 and shard.flags.c_contiguous


def block_passages(total_rows: int, n_vectors: int, depth: int, backend: Backend) -> int:
    """Return the number of passages of a block. Blocks are small enough that all blocks together return `depth` hits.

    Args:
        total_rows: passages of the corpus.
        n_vectors: vectors of a passage.
        depth: candidates that each query needs.
        backend: the backend, which may limit the hits of a block.

    Raises ValueError if a passage has more vectors than the backend can return.
    """
    rows = BLOCK_ROWS
    if backend.max_rows is not None:
        if n_vectors > backend.max_rows:
            raise ValueError(
                f"passages have {n_vectors} vectors, but {backend.name} can return at most {backend.max_rows} vectors: "
                "choose faiss-cpu or xla"
            )
        rows = min(rows, total_rows * n_vectors)  # one size for all depths that do not need smaller blocks
        limit = max(backend.max_rows, rows * backend.max_rows // (depth * n_vectors))
        while rows > limit:  # halves give few sizes, because a corpus in memory is loaded again for each size
            rows //= 2
    return max(1, rows // n_vectors)
