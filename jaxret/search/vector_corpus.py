"""Vectors in shards, as exact search reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxret.types import Ragged


@runtime_checkable
class ShardedRows(Protocol):
    """Rows in shards, as exact scores read them."""

    @property
    def total_rows(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (first row, rows) of each shard."""
        ...


@runtime_checkable
class NamedRows(ShardedRows, Protocol):
    """Rows of vectors, or of weights of words, in shards."""

    @property
    def dimension(self) -> int: ...
    def describe(self, row: int) -> str:
        """Return the name of a row for messages."""
        ...


@runtime_checkable
class VectorCorpus(NamedRows, Protocol):
    """Vectors in shards, [rows,V,D] or Ragged; an EncodedCorpus is one."""

    @property
    def ragged(self) -> bool:
        """Whether every row has its own number of vectors."""
        ...


@dataclass(frozen=True)
class BlockCorpus:
    """Blocks of vectors in memory as a corpus: all [rows,V,D] (float32 or float16) or all Ragged."""

    blocks: Sequence[np.ndarray | Ragged]

    def __post_init__(self) -> None:
        flat = [block.flat if isinstance(block, Ragged) else block for block in self.blocks]
        shapes = sorted({(isinstance(block, Ragged), *vectors.shape[1:]) for block, vectors in zip(self.blocks, flat)})
        wrong = len(shapes) != 1 or len(shapes[0]) != 3 - shapes[0][0] or 0 in shapes[0][1:]
        if wrong or self.total_rows == 0:
            sizes = [list(shape[1:]) for shape in shapes]
            raise ValueError(f"blocks of vectors must be [rows,V,D] with one V and D and at least a row, got {sizes}")
        if kinds := {str(vectors.dtype) for vectors in flat} - {"float32", "float16"}:
            raise ValueError(f"blocks of vectors must be float32 or float16, not {', '.join(sorted(kinds))}")
        first = 0
        for block in self.blocks:
            if isinstance(block, Ragged) and not block.lengths.all():
                raise ValueError(f"{self.describe(first + int(block.lengths.argmin()))} has no vector")
            first += len(block)

    @property
    def total_rows(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def dimension(self) -> int:
        first = self.blocks[0]
        return int((first.flat if isinstance(first, Ragged) else first).shape[-1])

    @property
    def ragged(self) -> bool:
        return isinstance(self.blocks[0], Ragged)

    def describe(self, row: int) -> str:
        return f"passage row {row}"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        first = 0
        for block in self.blocks:
            yield first, block
            first += len(block)
