"""A corpus that is held in memory for many searches: its vectors, with the backend, and its ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxret.retrieval.backends import Searcher
from jaxret.types import Ragged

IDS = 65_536  # that are held as texts while they are packed
KEPT_BYTES = 2**30  # of vectors as float32; what is larger is read from disk, shard by shard, for every search


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


class Ids:
    """The passage ids of all rows, packed: their bytes, and eight for where each ends."""

    def __init__(self, corpus: Stored) -> None:
        lengths, self._text = [np.zeros(1, np.int64)], bytearray()
        for start in range(0, corpus.total_rows, IDS):
            some = [key.encode() for key in corpus.ids(np.arange(start, min(start + IDS, corpus.total_rows)))]
            lengths.append(np.fromiter(map(len, some), np.int64, len(some)))
            self._text += b"".join(some)
        self._ends = np.cumsum(np.concatenate(lengths))

    def __call__(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        places = np.asarray(rows, np.int64)
        starts, ends = self._ends[places].tolist(), self._ends[places + 1].tolist()
        return [self._text[start:end].decode() for start, end in zip(starts, ends, strict=True)]


class Kept:
    """A corpus as search wants it, for one backend: one shard, in memory; or, without `vectors`, the shards on disk of
    what is on devices alone. Its ids are in memory. `blocks` is filled by the first search, for each number of
    documents to which the backend cuts blocks (0: it does not limit them)."""

    def __init__(self, corpus: Stored, vectors: np.ndarray | Ragged | None) -> None:
        self.total_rows, self.dimension, self.ragged = corpus.total_rows, corpus.dimension, corpus.ragged
        self.describe = corpus.describe
        self.vectors = vectors
        self.blocks: dict[int, list[Block]] = {}
        self.ids = Ids(corpus)
        self._corpus = corpus

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self.vectors is None:
            yield from self._corpus
        else:
            yield 0, self.vectors


def require_finite(corpus: Any, rows: np.ndarray, norms: np.ndarray) -> None:
    """Raises ValueError, naming the row, where a norm of `rounding.upper_norms` is not finite."""
    if not np.isfinite(norms).all():
        row = int(rows[np.argmin(np.isfinite(norms))])
        raise ValueError(
            f"{corpus.describe(row)} has a NaN, an infinity or a number too large in its vectors: "
            "the checkpoint or the encoding went wrong; encode again"
        )


def keep(corpus: Stored, on_devices: bool = False) -> Kept | Stored:
    """The corpus in memory, if its vectors are few enough; else, with `on_devices`, what the backend makes of it."""
    shards: list[Any] = []
    left = KEPT_BYTES - 4 * corpus.total_rows * corpus.dimension  # a row has one vector at least
    for _, shard in corpus if left >= 0 else ():
        vectors = int(shard.lengths.sum()) if corpus.ragged else len(shard) * shard.shape[1]
        left -= 4 * (vectors - len(shard)) * corpus.dimension
        if left < 0:
            break
        rows = shard.take(np.arange(len(shard))) if corpus.ragged else shard[: len(shard)]
        shards.append(rows.astype(np.float32))
    if left < 0:
        return Kept(corpus, None) if on_devices else corpus
    if not corpus.ragged:
        return Kept(corpus, np.concatenate(shards))
    lengths = np.concatenate([shard.lengths for shard in shards])
    return Kept(corpus, Ragged(np.concatenate([s.flat for s in shards]), np.concatenate([[0], np.cumsum(lengths)])))


def vectors_of(corpus: Stored | Kept, rows: np.ndarray) -> list[np.ndarray]:
    """The vectors [V,D] of each of some rows."""
    found: dict[int, np.ndarray] = {}
    for first_row, shard in corpus:
        for row in rows[(first_row <= rows) & (rows < first_row + len(shard))].tolist():
            found[row] = np.asarray(shard[row - first_row])
    return [found[row] for row in rows.tolist()]
