"""What carries everything: on devices Tokens -> HiddenStates -> Embeddings and a training Batch, on the host Ragged.

Axes have one letter everywhere: B queries, G documents per query, N = B * G documents in a step, T tokens,
L layers, H hidden size, K kept positions, V vectors per text, D vector size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

Array: TypeAlias = Any  # jax.Array on a device, np.ndarray still on the host


@struct.dataclass
class Packing:
    """Where an encoder finds texts that it computes without their padding, side by side in `rows` rows of `width`
    tokens on each device (and in each chunk). starts: where each text begins, these rows laid end to end; they rise,
    and a text without tokens begins behind them all."""

    starts: Int[Array, " B"]
    rows: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)


@struct.dataclass
class Tokens:
    """Padded token ids, texts on the first axis; padding is on the right. `rows` are those of the texts in the whole
    batch, where these are a part of one, or in another order: dropout's masks follow them. With `packing` an encoder
    computes the same states in fewer tokens. first: of pairs, how many tokens the first text of each has; the others
    are of type 1, where an encoder has types."""

    ids: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    rows: Int[Array, " B"] | None = None
    packing: Packing | None = None
    first: Int[Array, " B"] | None = None

    def computed(self, bins: int) -> int:
        """How many tokens an encoder computes for these texts, of which each of `bins` parts is encoded on its own."""
        if self.packing is None:
            return self.ids.size
        stacked = math.prod(self.packing.starts.shape[:-1])
        return stacked * bins * self.packing.rows * self.packing.width


@struct.dataclass
class HiddenStates:
    """What the encoder kept of every layer; layer 0 is the output of the embeddings."""

    states: Float[Array, "layers B K H"]
    mask: Bool[Array, "B K"]


@struct.dataclass
class Embeddings:
    """V vectors for each text. `mask` is False for vectors that do not exist (padding). `own_loss` is a (sum, count)
    for each text of a loss that needs no other text, or None."""

    vectors: Float[Array, "B V D"]
    mask: Bool[Array, "B V"]
    own_loss: Float[Array, "B 2"] | None = None


@struct.dataclass
class Batch:
    """One training step's input. Document i * G is the positive of query i, then come its hard negatives.

    Documents carry ids (their row among the training passages) instead of a mask: -1 marks an empty slot, and a
    document that is a known positive of a query is never a negative of that query.
    """

    queries: Tokens  # [B, Tq]
    documents: Tokens  # [N, Td]
    positives: Int[Array, " B"]  # index into the N documents
    document_ids: Int[Array, " N"]
    known_positives: Int[Array, "B P"]  # document ids, padded with -1
    pseudo_queries: Int[Array, "N U"] | None = None  # token ids of each document's pseudo-query, padded with -1
    teacher_scores: Float[Array, "B G"] | None = None  # of each query with its own documents

    @property
    def texts(self) -> tuple[Tokens, ...]:
        """All that encoders compute."""
        return self.queries, self.documents

    @property
    def size(self) -> int:
        """Queries of it (of each, if several are stacked), with empty places."""
        return self.positives.shape[-1]


@struct.dataclass
class PairBatch:
    """One step's input of a model that reads a query together with a document. Pair i * G is that of query i with its
    positive, then come those with its hard negatives; an empty slot has no tokens, and id -1."""

    pairs: Tokens  # [N, T]
    positives: Int[Array, " B"]  # -1: no query
    document_ids: Int[Array, "B G"]
    teacher_scores: Float[Array, "B G"] | None = None

    @property
    def texts(self) -> tuple[Tokens, ...]:
        """All that encoders compute."""
        return (self.pairs,)

    @property
    def size(self) -> int:
        """Queries of it, with empty places."""
        return self.positives.shape[-1]


AnyBatch: TypeAlias = Any  # a Batch, or another struct of arrays by row that has `texts` and `size`


@struct.dataclass
class Masked:
    """Texts to learn a language from, with some of their tokens hidden: the input of a step of pre-training. A row
    without tokens is no text.

    tokens: what the encoder reads. places, labels: of the hidden tokens, where they are and what they were; label -1 is
    none. Where a decoder recovers the text: whole, what it was; seen, which tokens each position's row may look at;
    targets, what it is to recover, -1 where there is nothing.
    """

    tokens: Tokens
    places: Int[Array, "B M"]
    labels: Int[Array, "B M"]
    whole: Int[Array, "B T"] | None = None
    seen: Bool[Array, "B T T"] | None = None
    targets: Int[Array, "B T"] | None = None

    @property
    def texts(self) -> tuple[Tokens, ...]:
        """All that encoders compute."""
        return (self.tokens,)

    @property
    def size(self) -> int:
        """Texts of it (of each, if several are stacked), with empty places."""
        return self.places.shape[-2]


VECTOR_DTYPES = ("float32", "float16")  # of vectors on disk


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array on the host: row i is `flat[offsets[i]:offsets[i + 1]]`. Token ids of
    many texts (flat: int32 [R]), or a list of vectors for each text (flat: [R,D]).

    Both arrays may be memory-mapped: what is asked of some rows reads those alone."""

    flat: np.ndarray  # [R] or [R,D]
    offsets: np.ndarray  # int64 [rows + 1]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Lists of whole numbers, as int32."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, count=int(offsets[-1])), offsets)

    @classmethod
    def from_stacked(cls, vectors: np.ndarray) -> Ragged:
        """[rows,V,D] as lists of V vectors."""
        rows, count, dimension = vectors.shape
        return cls(vectors.reshape(-1, dimension), np.arange(rows + 1) * count)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | np.integer) -> np.ndarray:
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [rows]."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """int64: the lengths of some rows."""
        rows = np.asarray(rows, np.int64)
        return self.offsets[rows + 1] - self.offsets[rows]

    def part(self, start: int, stop: int) -> Ragged:
        """Rows `start` to `stop`, not copied."""
        begin, end = self.offsets[start], self.offsets[stop]
        return Ragged(self.flat[begin:end], self.offsets[start : stop + 1] - begin)

    def stacked(self) -> np.ndarray:
        """[rows,V,...] of rows that all have V items. Raises ValueError if they do not."""
        lengths = np.unique(self.lengths) if len(self) else np.ones(1, np.int64)
        if len(lengths) > 1:
            raise ValueError(f"rows have {lengths[0]} to {lengths[-1]} items; they cannot be stacked")
        return self.flat.reshape(len(self), lengths[0], *self.flat.shape[1:])

    def take(self, rows: np.ndarray) -> Ragged:
        """Some rows, copied, in the order given."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(self.lengths_of(rows), out=offsets[1:])
        flat = np.empty((int(offsets[-1]), *self.flat.shape[1:]), self.flat.dtype)
        for i, row in enumerate(rows):
            flat[offsets[i] : offsets[i + 1]] = self[row]
        return Ragged(flat, offsets)

    def padded(
        self, rows: Sequence[int] | np.ndarray, length: int, fill: float | int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """(items [rows,length,...], mask [rows,length]), padded with `fill`. Row -1 is empty, all padding; what is
        longer is cut."""
        rows = np.asarray(rows, np.int64)
        sizes = np.zeros(len(rows), np.int64)
        sizes[rows >= 0] = self.lengths_of(rows[rows >= 0])
        mask = np.arange(length) < sizes[:, None]
        items = np.full((len(rows), length, *self.flat.shape[1:]), fill, self.flat.dtype)
        if mask.any():
            items[mask] = np.concatenate([self[row][:length] for row in rows if row >= 0])
        return items, mask

    def astype(self, dtype: Any) -> Ragged:
        return Ragged(self.flat.astype(dtype), self.offsets)
