"""A corpus that is held in memory for many searches: its vectors, with the backend, and its ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxret.search.proof import BlockSearch
from jaxret.search.vector_corpus import VectorCorpus
from jaxret.types import Ragged

IDS = 65_536  # that are held as texts while they are packed
MEMORY_BYTES = 2**30  # of vectors as float32; a larger corpus is read from disk, shard by shard, for every search


class LoadedBlock(NamedTuple):
    """Passages that a backend has loaded."""

    rows: np.ndarray  # int64 [N], their rows in the corpus
    top: BlockSearch
    largest_norm: float  # of any of their vectors


@runtime_checkable
class StoredCorpus(VectorCorpus, Protocol):
    """An encoded corpus as it is on disk; an EncodedCorpus is one."""

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]: ...


class PackedIds:
    """The passage ids of all rows, packed: their bytes, and eight for the end of each."""

    def __init__(self, corpus: StoredCorpus) -> None:
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


class InMemoryCorpus:
    """A corpus for one backend, in memory as one shard; or, without `vectors`, on devices, with the shards on disk.

    The ids are in memory. `blocks` is filled by the first search, and again by one whose blocks must be smaller:
    `block_size` is the number of passages to which the backend limits them (0: no limit).
    """

    def __init__(self, corpus: StoredCorpus, vectors: np.ndarray | Ragged | None) -> None:
        self.total_rows, self.dimension, self.ragged = corpus.total_rows, corpus.dimension, corpus.ragged
        self.describe = corpus.describe
        self.vectors = vectors
        self.blocks: list[LoadedBlock] | None = None
        self.block_size = 0
        self.ids = PackedIds(corpus)
        self._corpus = corpus

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self.vectors is None:
            yield from self._corpus
        else:
            yield 0, self.vectors


def require_finite_vectors(corpus: Any, rows: np.ndarray, norms: np.ndarray) -> None:
    """Raise ValueError, naming the row, where a norm of `rounding.upper_norms` is not finite."""
    if not np.isfinite(norms).all():
        row = int(rows[np.argmin(np.isfinite(norms))])
        raise ValueError(
            f"{corpus.describe(row)} has a NaN, an infinity or a number too large in its vectors: "
            "the checkpoint or the encoding went wrong; encode again"
        )


def hold_in_memory(corpus: StoredCorpus, on_devices: bool = False) -> InMemoryCorpus | StoredCorpus:
    """Return the corpus in memory, if its vectors are few enough; else, with `fits_devices`, on the devices; else the
    corpus as it is."""
    shards: list[Any] = []
    left = MEMORY_BYTES - 4 * corpus.total_rows * corpus.dimension  # a row has one vector at least
    for _, shard in corpus if left >= 0 else ():
        vectors = int(shard.lengths.sum()) if corpus.ragged else len(shard) * shard.shape[1]
        left -= 4 * (vectors - len(shard)) * corpus.dimension
        if left < 0:
            break
        rows = shard.take(np.arange(len(shard))) if corpus.ragged else shard[: len(shard)]
        shards.append(rows.astype(np.float32))
    if left < 0:
        return InMemoryCorpus(corpus, None) if on_devices else corpus
    if not corpus.ragged:
        return InMemoryCorpus(corpus, np.concatenate(shards))
    lengths = np.concatenate([shard.lengths for shard in shards])
    return InMemoryCorpus(
        corpus, Ragged(np.concatenate([shard.flat for shard in shards]), np.concatenate([[0], np.cumsum(lengths)]))
    )


def vectors_of(corpus: StoredCorpus | InMemoryCorpus, rows: np.ndarray) -> list[np.ndarray]:
    """Return the vectors [V,D] of each of some rows."""
    vectors: dict[int, np.ndarray] = {}
    for first_row, shard in corpus:
        for row in rows[(first_row <= rows) & (rows < first_row + len(shard))].tolist():
            vectors[row] = np.asarray(shard[row - first_row])
    return [vectors[row] for row in rows.tolist()]
