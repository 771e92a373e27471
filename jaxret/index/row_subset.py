"""Some rows of a shard, with the interface of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.types import Ragged


class RowSubset:
    """Some rows of a shard [rows,V,D]; copied on access."""

    def __init__(self, shard: np.ndarray, rows: np.ndarray) -> None:
        self._shard, self._rows = shard, rows
        self.shape = (len(rows), *shard.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> np.ndarray:
        """Return `shard[key]` of the chosen rows: rows, or (rows, vectors, ...), as of an array."""
        row_key, *others = key if isinstance(key, tuple) else (key,)
        rows = self._read(row_key)
        if not others:
            return rows
        return rows[tuple(others)] if isinstance(row_key, (int, np.integer)) else rows[(slice(None), *others)]

    def _read(self, key: Any) -> np.ndarray:
        return self._shard[self._rows[key]]

    def take(self, rows: np.ndarray, axis: int, mode: Any) -> np.ndarray:
        """Return some of the rows, like numpy's `take`."""
        return self._shard.take(self._rows[rows], axis=axis, mode=mode)


class RaggedRowSubset:
    """Some rows of a shard of lists of vectors; copied on access."""

    def __init__(self, shard: Ragged, rows: np.ndarray) -> None:
        self._shard, self._rows = shard, rows
        self.lengths = shard.lengths_of(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int | np.integer) -> np.ndarray:
        return self._shard[self._rows[row]]

    def take(self, rows: np.ndarray) -> Ragged:
        return self._shard.take(self._rows[rows])
