"""A corpus that stays open for many searches: shards mapped, blocks with the backend, ids read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxret.retrieval.backends import Searcher

KEPT_BYTES = 2**30  # of vectors as float32; what is larger is read from disk, shard by shard, for every search
KEPT_SHARDS = 256  # each is an open file


class Block(NamedTuple):
    """Documents that a backend has taken."""

    documents: np.ndarray  # int64 [N], their rows in the corpus
    top: Searcher
    largest_norm: float  # of any of their vectors


@runtime_checkable
class Stored(Protocol):
    """An encoded corpus as it is on disk; an EncodedCorpus is one."""

    @property
    def total_rows(self) -> int: ...
    @property
    def dimension(self) -> int: ...
    @property
    def ragged(self) -> bool: ...
    def describe(self, row: int) -> str: ...
    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]: ...
    def __iter__(self) -> Iterator[tuple[int, Any]]: ...


class Kept:
    """A corpus as search wants it, for one backend; `blocks` is filled by the first search, for each depth at which the
    backend cuts blocks (0: it does not look at that)."""

    def __init__(self, corpus: Stored, shards: list[tuple[int, Any]]) -> None:
        self.total_rows, self.dimension, self.ragged = corpus.total_rows, corpus.dimension, corpus.ragged
        self.describe = corpus.describe
        self.shards = shards
        self.blocks: dict[int, list[Block]] = {}
        self._ids = corpus.ids(np.arange(corpus.total_rows))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(self.shards)

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return [self._ids[row] for row in indices]


def keep(corpus: Stored) -> Kept | Stored:
    """The corpus, kept open if its vectors and its files are few enough."""
    if 4 * corpus.total_rows * corpus.dimension > KEPT_BYTES:  # one vector a row at least
        return corpus
    shards: list[tuple[int, Any]] = []
    numbers = 0
    for first_row, shard in corpus:
        shards.append((first_row, shard))
        numbers += int(shard.lengths.sum()) * corpus.dimension if corpus.ragged else int(np.prod(shard.shape))
        if len(shards) > KEPT_SHARDS or 4 * numbers > KEPT_BYTES:
            return corpus
    return Kept(corpus, shards)


def vectors_of(corpus: Stored | Kept, rows: np.ndarray) -> list[np.ndarray]:
    """The vectors [V,D] of each of some rows, in the dtype on disk."""
    found: dict[int, np.ndarray] = {}
    for first_row, shard in corpus:
        for row in rows[(first_row <= rows) & (rows < first_row + len(shard))].tolist():
            found[row] = np.asarray(shard[row - first_row])
    return [found[row] for row in rows.tolist()]
