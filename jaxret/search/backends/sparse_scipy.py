"""Products of sparse vectors on a CPU: scipy multiplies the queries with an inverted list for every word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
from scipy.sparse import csr_array

from jaxret.search.proof import BlockHits, best_columns
from jaxret.types import SparseRows

SCORES_AT_ONCE = 2**24  # float64 scores in memory at a time: 128 MiB


@dataclass(frozen=True)
class ScipyLists:
    """The backend that searches inverted lists on the CPU. Products are summed in float64 and stored in float32."""

    reason: str

    @property
    def description(self) -> str:
        return f"inverted lists (scipy {scipy.__version__}) on the CPU ({self.reason})"

    def load(self, block: SparseRows) -> ScipyBlock:
        return ScipyBlock(as_csr(block).T.tocsr())


@dataclass(frozen=True)
class ScipyBlock:
    """A block of passages as inverted lists."""

    lists: csr_array  # [D, rows] float64

    def __call__(self, queries: SparseRows, k: int) -> BlockHits:
        left = as_csr(queries)
        step = max(1, SCORES_AT_ONCE // self.lists.shape[1])
        parts = [
            best_products((left[start : start + step] @ self.lists).toarray(), k)
            for start in range(0, len(queries), step)
        ]
        return BlockHits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def as_csr(rows: SparseRows) -> csr_array:
    """Return sparse vectors as a matrix float64 [rows, D]."""
    words = np.asarray(rows.words).astype(np.int32)
    return csr_array((np.asarray(rows.weights, np.float64), words, rows.offsets), shape=(len(rows), rows.dimension))


def best_products(products: np.ndarray, k: int) -> BlockHits:
    """Return the k highest products above 0 of each row of float64 [Q,n], padded with columns of score -inf."""
    scores = np.where(products > 0, products, -np.inf).astype(np.float32)
    return best_columns(scores, min(k, scores.shape[1]))
