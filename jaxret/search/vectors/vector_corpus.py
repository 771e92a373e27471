"""The interface of corpora in exact search: vectors in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxret.types import Ragged


@runtime_checkable
class ShardedRows(Protocol):
    """Rows in shards, which exact scores need."""

    @property
    def total_rows(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (first row, rows) of each shard."""
        ...


@runtime_checkable
class NamedRows(ShardedRows, Protocol):
    """Rows of dense or sparse vectors in shards."""

    @property
    def dimension(self) -> int:
        """Return D, the size of a vector; of sparse vectors, the size of the vocabulary."""
        ...

    def describe(self, row: int) -> str:
        """Return the name of a row in messages."""
        ...


@runtime_checkable
class VectorCorpus(NamedRows, Protocol):
    """Dense vectors in shards [rows,V,D] or Ragged, such as an EncodedCorpus."""

    @property
    def ragged(self) -> bool:
        """Return whether rows have different numbers of vectors."""
        ...


@dataclass(frozen=True)
class BlockCorpus:
    """A corpus of blocks of vectors in memory: all [rows,V,D] (float32 or float16) or all Ragged."""

    blocks: Sequence[np.ndarray | Ragged]

    def __post_init__(self) -> None:
        flat = [block.flat if isinstance(block, Ragged) else block for block in self.blocks]
        shapes = sorted({(isinstance(block, Ragged), *vectors.shape[1:]) for block, vectors in zip(self.blocks, flat)})
        irregular = len(shapes) != 1 or len(shapes[0]) != 3 - shapes[0][0] or 0 in shapes[0][1:]
        if irregular or self.total_rows == 0:
            sizes = [list(shape[1:]) for shape in shapes]
            raise ValueError(
                f"blocks of vectors have shapes {sizes} after the rows; all must be [rows,V,D] with the same V and D, "
                "and at least one row"
            )
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
