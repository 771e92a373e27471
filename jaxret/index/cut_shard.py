"""A shard whose vectors are cut to their first dimensions. It has the interface of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.index.row_subset import RaggedRowSubset, RowSubset
from jaxret.runs.cut_vectors import cut_vectors
from jaxret.types import Ragged


class CutShard(RowSubset):
    """A shard [rows,V,D] whose vectors are cut to their first `size` dimensions when they are read."""

    def __init__(self, shard: Any, size: int, normalize: bool) -> None:
        self._shard, self._size, self._normalize = shard, size, normalize
        self.shape = (*shard.shape[:-1], size)

    def __len__(self) -> int:
        return len(self._shard)

    def _read_rows(self, key: Any) -> np.ndarray:
        return cut_vectors(np.asarray(self._shard[key]), self._size, self._normalize)

    def take(self, rows: np.ndarray, axis: int, mode: Any) -> np.ndarray:
        return cut_vectors(self._shard.take(rows, axis=axis, mode=mode), self._size, self._normalize)


class CutRaggedShard(RaggedRowSubset):
    """A shard of lists of vectors, which are cut to their first `size` dimensions when they are read."""

    def __init__(self, shard: Any, size: int, normalize: bool) -> None:
        self._shard, self._size, self._normalize = shard, size, normalize
        self.lengths = shard.lengths

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, row: int | np.integer) -> np.ndarray:
        return cut_vectors(self._shard[row], self._size, self._normalize)

    def take(self, rows: np.ndarray) -> Ragged:
        vectors = self._shard.take(rows)
        return Ragged(cut_vectors(vectors.flat, self._size, self._normalize), vectors.offsets)


def cut_shard(shard: Any, size: int, normalize: bool) -> CutShard | CutRaggedShard:
    """Return a shard, [rows,V,D] or lists of vectors, whose vectors are cut to `size` dimensions."""
    return (CutShard if hasattr(shard, "shape") else CutRaggedShard)(shard, size, normalize)
