"""Scores of texts with different numbers of vectors (ColBERT): the sum over query vectors of the maximum over passage
vectors.

Vectors on disk have no padding. A block of passages of similar lengths is padded when it is searched.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxret.index.row_subset import RaggedRowSubset
from jaxret.runs.embedder import plan_batches
from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.select import Backend
from jaxret.search.rounding import sum_error, upper_norms
from jaxret.search.vectors.single_vector import BLOCK_ROWS, QUERY_ROWS, query_spans
from jaxret.types import LONGEST_NORM, Ragged

PASSAGES_AT_ONCE = 512  # passages scored exactly at a time for one query, because their vectors are in float64
# For at most this many multiplications OpenBLAS starts no threads. Its threads would wait ten milliseconds for XLA's
# threads, which stay busy after a search.
ONE_THREAD = 2**18


class VectorLists:
    """Queries with several float32 vectors, for shards of lists of vectors (`query_vectors.QueryVectors`)."""

    pairs_a_thread = 2**20  # many, because BLAS has its own threads

    def __init__(self, vectors: Ragged) -> None:
        self.vectors = vectors
        self.norms = upper_norms(vectors.flat)
        query = np.repeat(np.arange(len(vectors)), vectors.lengths)
        norm_sums = np.bincount(query, self.norms, len(vectors))
        self.norms[(norm_sums >= LONGEST_NORM)[query]] = np.inf  # no product overflows, but the sum of products could

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        return self.vectors[i].astype(np.float64)

    def owner(self, vector: int) -> int:
        return int(np.searchsorted(self.vectors.offsets, vector, "right")) - 1

    def take(self, part: np.ndarray) -> VectorLists:
        return VectorLists(self.vectors.take(part))

    def parts(self) -> list[tuple[slice, Ragged]]:
        """Return slices of queries and their vectors, about QUERY_ROWS vectors in each."""
        slices, start, offsets = [], 0, self.vectors.offsets
        while start < len(self):
            stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + QUERY_ROWS, "right")) - 1)
            slices.append((slice(start, stop), self.vectors.part(start, stop)))
            start = stop
        return slices

    def blocks(
        self, shard: Ragged | RaggedRowSubset, total_rows: int, depth: int, backend: Backend
    ) -> Iterator[tuple[np.ndarray, PaddedLists, np.ndarray]]:
        for rows, size, length in plan_batches(shard.lengths, BLOCK_ROWS, 1):
            rows = np.sort(rows)
            block = shard.take(rows).astype(np.float32)
            norms = np.maximum.reduceat(upper_norms(block.flat), block.offsets[:-1])  # NaN if one of them is NaN
            numbers = np.pad(np.arange(len(rows)), (0, size - len(rows)), constant_values=-1)  # -1: an empty list
            yield rows, PaddedLists(*block.padded(numbers, length), len(rows)), norms

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        norm_lists = Ragged(self.norms, self.vectors.offsets)
        return np.array([sum_error(self.vectors.flat.shape[1], norms, largest_norm, unit) for norms in norm_lists])

    def scores(self, queries: np.ndarray, shard: Ragged | RaggedRowSubset, rows: np.ndarray) -> np.ndarray:
        result = np.empty(len(rows))
        for begin, end in query_spans(queries):
            query = self[queries[begin]]
            for start in range(begin, end, PASSAGES_AT_ONCE):
                part = slice(start, min(start + PASSAGES_AT_ONCE, end))
                passages = shard.take(rows[part])
                products = _small_products(query, passages.flat)  # [U, vectors]: maxima are taken of contiguous numbers
                result[part] = np.maximum.reduceat(products, passages.offsets[:-1], axis=1).sum(axis=0)
        return result

    def every_score(self, shard: Ragged | RaggedRowSubset, start: int, stop: int) -> np.ndarray:
        passages = shard.take(np.arange(start, stop))
        products = self.vectors.flat.astype(np.float64) @ passages.flat.astype(np.float64).T
        maxima = np.maximum.reduceat(products, passages.offsets[:-1], axis=1)  # [vectors of all queries, rows]
        return np.stack([query_maxima.sum(axis=0) for query_maxima in Ragged(maxima, self.vectors.offsets)])


def _small_products(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the products of a query float64 [U,D] and vectors [N,D] as float64 [U,N], computed in this thread."""
    products = np.empty((len(query), len(vectors)))
    step = max(1, ONE_THREAD // query.size)
    for start in range(0, len(vectors), step):
        products[:, start : start + step] = query @ vectors[start : start + step].astype(np.float64).T
    return products
