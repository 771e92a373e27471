"""A subset of a shard's rows. It has the interface of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np

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
        return self._shard.take(self._rows[rows])
