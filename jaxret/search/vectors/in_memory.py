"""A corpus in memory for many searches: vectors, blocks that the backend has loaded, and passage ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxret.search.proof import BlockSearch
from jaxret.search.vectors.vector_corpus import VectorCorpus
from jaxret.types import Ragged

IDS_AT_ONCE = 65_536  # ids that are in memory as str at a time
# Limit of float32 vectors in memory. A larger corpus is read from disk in every search, shard by shard.
MEMORY_BYTES = 2**30


class LoadedBlock(NamedTuple):
    """Passages that a backend has loaded."""

    rows: np.ndarray  # int64 [N], rows of the passages in the corpus
    top: BlockSearch  # searches the block
    largest_norm: float  # upper bound of the norms of the vectors


@runtime_checkable
class StoredCorpus(VectorCorpus, Protocol):
    """A corpus of vectors with passage ids, such as an EncodedCorpus."""

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return the ids of passages by their rows."""
        ...


class PackedIds:
    """The passage ids of all rows as one array of bytes, with the end of each id (8 bytes)."""

    def __init__(self, corpus: StoredCorpus) -> None:
        lengths, self._text = [np.zeros(1, np.int64)], bytearray()
        for start in range(0, corpus.total_rows, IDS_AT_ONCE):
            rows = np.arange(start, min(start + IDS_AT_ONCE, corpus.total_rows))
            ids = [key.encode() for key in corpus.ids(rows)]
            lengths.append(np.fromiter(map(len, ids), np.int64, len(ids)))
            self._text += b"".join(ids)
        self._ends = np.cumsum(np.concatenate(lengths))

    def __call__(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        numbers = np.asarray(rows, np.int64)
        starts, ends = self._ends[numbers].tolist(), self._ends[numbers + 1].tolist()
        return [self._text[start:end].decode() for start, end in zip(starts, ends, strict=True)]


class InMemoryCorpus:
    """A corpus whose vectors are in memory as one shard, or (`vectors` is None) on the devices of a backend.

    The ids are in memory. The first search fills `blocks`; a later search fills them again if it needs smaller blocks.
    `block_size` is the largest number of passages of a block on the backend (0: no limit).
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
    """Raise ValueError with the row if one of the norms, results of `rounding.upper_norms`, is not finite."""
    if not np.isfinite(norms).all():
        row = int(rows[np.argmin(np.isfinite(norms))])
        raise ValueError(
            f"{corpus.describe(row)} has a NaN, an infinity or a number too large in its vectors. Check the "
            "checkpoint, and encode again"
        )


def hold_in_memory(corpus: StoredCorpus, on_devices: bool = False) -> InMemoryCorpus | StoredCorpus:
    """Return the corpus in memory if it takes at most MEMORY_BYTES.

    A larger corpus is returned as it is, or with `on_devices` as a corpus that a search loads onto the devices.
    """
    shards: list[Any] = []
    left = MEMORY_BYTES - 4 * corpus.total_rows * corpus.dimension  # a row has at least one vector
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
