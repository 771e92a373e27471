"""A subset of a shard's rows, and a shard whose vectors are cut to their first dimensions. Both have a shard's
interface."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.runs.cut_vectors import cut_vectors
from jaxret.types import Ragged


class RowSubset:
    """A subset of the rows of a shard [rows,V,D]. An access copies vectors."""

    def __init__(self, shard: np.ndarray, rows: np.ndarray) -> None:
        self._shard, self._rows = shard, rows
        self.shape = (len(rows), *shard.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> np.ndarray:
        """Index the subset like an array: `key` is rows, or (rows, vectors, ...)."""
        row_key, *vector_keys = key if isinstance(key, tuple) else (key,)
        rows = self._read_rows(row_key)
        if not vector_keys:
            return rows
        return rows[tuple(vector_keys)] if isinstance(row_key, (int, np.integer)) else rows[(slice(None), *vector_keys)]

    def _read_rows(self, key: Any) -> np.ndarray:
        return self._shard[self._rows[key]]

    def take(self, rows: np.ndarray, axis: int, mode: Any) -> np.ndarray:
        """Return rows of the subset, like numpy's `take`."""
        return self._shard.take(self._rows[rows], axis=axis, mode=mode)


class RaggedRowSubset:
    """A subset of the rows of a shard with lists of vectors. An access copies vectors."""

    def __init__(self, shard: Ragged, rows: np.ndarray) -> None:
        self._shard, self._rows = shard, rows
        self.lengths = shard.lengths_of(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int | np.integer) -> np.ndarray:
        return self._shard[self._rows[row]]

    def take(self, rows: np.ndarray) -> Ragged:
        """Return copies of rows of the subset, which are numbered from 0."""
        return self._shard.take(self._rows[rows])


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
