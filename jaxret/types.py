"""Data structures that all layers share: Tokens, HiddenStates, Embeddings and batches on devices, Ragged on the host.

Axes have the same letters everywhere: B queries (or texts), G passages per query, N = B * G passages in a step, T
tokens, L layers, H hidden size, K positions, V vectors per text, D vector size, P known positives per query, U tokens
of a pseudo-query, M masked tokens per text, R rows of a flat array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

Array: TypeAlias = Any  # jax.Array on a device, np.ndarray on the host
Tree: TypeAlias = Any  # arrays in nested dicts, dataclasses and tuples
Params: TypeAlias = dict[str, Any]  # a tree of parameters
Scalar: TypeAlias = Float[Array, ""]
Log: TypeAlias = Callable[[str], None]  # prints a line, in one process


@struct.dataclass
class Packing:
    """Positions of texts in packed rows, which have no padding between texts.

    Each device (and each chunk of its part of a batch) has `rows` rows of `width` tokens.
    """

    # Position of each text's first token in the concatenated rows [B], in ascending order. A text without tokens starts
    # after all rows.
    starts: Int[Array, " B"]
    rows: int = struct.field(pytree_node=False)  # rows per device and chunk
    width: int = struct.field(pytree_node=False)  # tokens per row


@struct.dataclass
class Tokens:
    """Padded token ids of texts; padding is on the right."""

    ids: Int[Array, "B T"]  # token ids [B, T]
    mask: Bool[Array, "B T"]  # True for real tokens [B, T]
    # Row of each text in the full batch [B], on which dropout masks depend. None: the texts are the full batch, in
    # order.
    rows: Int[Array, " B"] | None = None
    # Positions for packed encoding, which computes the same states with fewer tokens. None: not packed.
    packing: Packing | None = None
    # For pairs, the number of tokens of the first text [B]. The other tokens have type 1, if the encoder has token
    # types. None: no pairs.
    first: Int[Array, " B"] | None = None
    mean_mask: Bool[Array, "B T"] | None = None  # True for tokens of a mean [B, T]. None: all real tokens.

    def computed_tokens(self, bins: int) -> int:
        """Return the number of tokens that an encoder computes for these texts, padding included.

        Args:
            bins: number of parts of the batch that are encoded separately (devices times chunks).
        """
        if self.packing is None:
            return self.ids.size
        batches = math.prod(self.packing.starts.shape[:-1])
        return batches * bins * self.packing.rows * self.packing.width


@struct.dataclass
class HiddenStates:
    """Hidden states of every layer at K positions of each text. Layer 0 is the output of the embeddings."""

    states: Float[Array, "layers B K H"]
    mask: Bool[Array, "B K"]


@struct.dataclass
class Embeddings:
    """V vectors of each text."""

    vectors: Float[Array, "B V D"]  # [B, V, D]
    mask: Bool[Array, "B V"]  # False for vectors that do not exist (padding) [B, V]
    # (sum, count) for each text of a loss that depends on this text alone [B, 2]. None: no such loss.
    auxiliary_loss: Float[Array, "B 2"] | None = None


@struct.dataclass
class Batch:
    """The input of one training step. Passage i * G is the positive of query i; its hard negatives follow.

    Passages have ids (rows among the training passages) instead of a mask. A passage whose id is a known positive of a
    query is never a negative of this query.
    """

    queries: Tokens  # tokens [B, Tq]
    passages: Tokens  # tokens [N, Tp]
    positives: Int[Array, " B"]  # index of each query's positive among the N passages [B]; -1: no query
    passage_ids: Int[Array, " N"]  # id of each passage [N]; -1: empty slot
    # Ids of the known positives of each query [B, P], padded with -1.
    known_positives: Int[Array, "B P"]
    # Token ids of each passage's pseudo-query [N, U], padded with -1. None: not used.
    pseudo_queries: Int[Array, "N U"] | None = None
    # Teacher's score of each query with each of its passages [B, G]; NaN: no score. None: no teacher.
    teacher_scores: Float[Array, "B G"] | None = None

    @property
    def texts(self) -> tuple[Tokens, ...]:
        return self.queries, self.passages

    @property
    def size(self) -> int:
        """The number of queries of a batch, empty slots included. If batches are stacked, it is the last axis."""
        return self.positives.shape[-1]


@struct.dataclass
class PairBatch:
    """The input of a training step of a cross-encoder. Pair i * G is query i with its positive; its pairs with
    negatives follow."""

    pairs: Tokens  # tokens [N, T]; an empty slot has no tokens
    positives: Int[Array, " B"]  # index of each query's positive pair among the N pairs [B]; -1: no query
    passage_ids: Int[Array, "B G"]  # id of each pair's passage [B, G]; -1: empty slot
    # Teacher's score of each pair [B, G]; NaN: no score. None: no teacher.
    teacher_scores: Float[Array, "B G"] | None = None

    @property
    def texts(self) -> tuple[Tokens, ...]:
        return (self.pairs,)

    @property
    def size(self) -> int:
        """The number of queries, empty slots included."""
        return self.positives.shape[-1]


@runtime_checkable
class TrainingBatch(Protocol):
    """The input of one training step of any task: a struct of arrays whose first axis is the row."""

    @property
    def texts(self) -> tuple[Tokens, ...]:
        """Return the texts of the batch, which encoders read."""
        ...

    @property
    def size(self) -> int:
        """The number of rows, empty rows included. Chunks of a batch are ranges of rows."""
        ...


BatchT = TypeVar("BatchT", bound=TrainingBatch)


@struct.dataclass
class MaskedTexts:
    """The input of one step of pre-training: texts with masked tokens. A row without tokens is empty.

    The last three fields are for a decoder that reconstructs the text; without a decoder, they are None.
    """

    tokens: Tokens  # tokens of the masked texts [B, T]
    positions: Int[Array, "B M"]  # positions of the masked tokens [B, M]
    labels: Int[Array, "B M"]  # original ids of the masked tokens [B, M]; -1: none
    original_ids: Int[Array, "B T"] | None = None  # ids of the original text [B, T]
    # True where a position of the decoder (second axis) may attend to a token (third axis) [B, T, T]
    attention_mask: Bool[Array, "B T T"] | None = None
    targets: Int[Array, "B T"] | None = None  # id that the decoder predicts at each position [B, T]; -1: none

    @property
    def texts(self) -> tuple[Tokens, ...]:
        return (self.tokens,)

    @property
    def size(self) -> int:
        """The number of texts of a batch, empty rows included. If batches are stacked, it is the last axis but one."""
        return self.positions.shape[-2]


VECTOR_DTYPES = ("float32", "float16")  # types of vectors on disk
# Largest norm of a vector, about 9e18: float32 products of longer vectors may overflow.
LONGEST_NORM = math.sqrt(float(np.finfo(np.float32).max) / 4)


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array on the host: row i is `flat[offsets[i]:offsets[i + 1]]`.

    It holds the token ids of many texts (`flat` is int32 [R]) or the vectors of many texts (`flat` is [R, D]). Both
    arrays may be memory-mapped; methods for selected rows read only these rows.
    """

    flat: np.ndarray  # [R] or [R,D]
    offsets: np.ndarray  # int64 [rows + 1]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Return lists of integers as rows of int32."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, count=int(offsets[-1])), offsets)

    @classmethod
    def from_stacked(cls, vectors: np.ndarray) -> Ragged:
        """Return `vectors` [rows, V, D] as rows of V vectors each."""
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
        """The length of every row, int64 [rows]."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the lengths of some rows, int64."""
        rows = np.asarray(rows, np.int64)
        return self.offsets[rows + 1] - self.offsets[rows]

    def part(self, start: int, stop: int) -> Ragged:
        """Return rows `start` to `stop` (excluded) without copying `flat`."""
        begin, end = self.offsets[start], self.offsets[stop]
        return Ragged(self.flat[begin:end], self.offsets[start : stop + 1] - begin)

    def stacked(self) -> np.ndarray:
        """Return an array [rows, V, ...] if all rows have V items. Raises ValueError if lengths differ."""
        lengths = np.unique(self.lengths) if len(self) else np.ones(1, np.int64)
        if len(lengths) > 1:
            raise ValueError(f"rows have {lengths[0]} to {lengths[-1]} items; only rows of equal length can be stacked")
        return self.flat.reshape(len(self), lengths[0], *self.flat.shape[1:])

    def take(self, rows: np.ndarray) -> Ragged:
        """Return a copy of some rows, in the order of `rows`."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(self.lengths_of(rows), out=offsets[1:])
        flat = np.empty((int(offsets[-1]), *self.flat.shape[1:]), self.flat.dtype)
        for i, row in enumerate(rows):
            flat[offsets[i] : offsets[i + 1]] = self[row]
        return Ragged(flat, offsets)

    def padded(
        self, rows: Sequence[int] | np.ndarray, length: int, fill: float | int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (items [rows, length, ...], mask [rows, length]): some rows, padded with `fill` or cut to `length`.

        Row -1 is empty, all padding.
        """
        rows = np.asarray(rows, np.int64)
        sizes = np.zeros(len(rows), np.int64)
        sizes[rows >= 0] = self.lengths_of(rows[rows >= 0])
        mask = np.arange(length) < sizes[:, None]
        items = np.full((len(rows), length, *self.flat.shape[1:]), fill, self.flat.dtype)
        if mask.any():
            items[mask] = np.concatenate([self[row][:length] for row in rows if row >= 0])
        return items, mask

    def astype(self, dtype: Any) -> Ragged:
        """Return a copy with items of another type. A number that is too large for it becomes infinite, without a
        warning."""
        with np.errstate(over="ignore"):  # an infinity is an error where vectors are stored
            return Ragged(self.flat.astype(dtype), self.offsets)


@dataclass(frozen=True)
class SparseRows:
    """A sparse vector of word weights for each row, on the host, in the CSR layout.

    Row i has the words `words[offsets[i]:offsets[i + 1]]`, in ascending order, with the weights at the same indices of
    `weights`. All other words have weight 0. Arrays may be memory-mapped. The methods that `Ragged` also has return
    dense vectors, with V = 1.
    """

    words: np.ndarray  # uint16 or uint32 [E]
    weights: np.ndarray  # float32 or float16 [E]
    offsets: np.ndarray  # int64 [rows + 1]
    dimension: int  # D, the number of words in the vocabulary

    @classmethod
    def from_dense(cls, vectors: np.ndarray, limit: int = 0) -> SparseRows:
        """Return the weights above 0 (or NaN) of `vectors` [rows, D]. If `limit` is not 0, keep only this number of
        words per row, those with the largest weights. Of equal weights, those of lower ids are kept."""
        mask = ~(vectors <= 0)
        if limit:
            for row in np.flatnonzero(mask.sum(axis=1) > limit):
                mask[row, np.argsort(-vectors[row], kind="stable")[limit:]] = False
        rows, words = np.nonzero(mask)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(vectors)))]).astype(np.int64)
        return cls(words.astype(word_dtype(vectors.shape[1])), vectors[rows, words], offsets, vectors.shape[1])

    @classmethod
    def concatenate(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """Return the rows of all parts, one part after the other."""
        lengths = np.concatenate([part.word_counts for part in parts])
        words, weights = (np.concatenate([getattr(part, name) for part in parts]) for name in ("words", "weights"))
        return cls(words, weights, np.concatenate([[0], np.cumsum(lengths)]), parts[0].dimension)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | np.integer) -> np.ndarray:
        """Return the dense vector of a row, [1, D]."""
        return self.take(np.array([row])).stacked()[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @property
    def word_counts(self) -> np.ndarray:
        """The number of words of every row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def lengths(self) -> np.ndarray:
        """The number of vectors of every row, which is 1."""
        return np.ones(len(self), np.int64)

    @property
    def flat(self) -> np.ndarray:
        """The dense vectors [rows, D]."""
        return self.stacked()[:, 0]

    def part(self, start: int, stop: int) -> SparseRows:
        """Return rows `start` to `stop` (excluded) without a copy."""
        begin, end = self.offsets[start], self.offsets[stop]
        offsets = self.offsets[start : stop + 1] - begin
        return SparseRows(self.words[begin:end], self.weights[begin:end], offsets, self.dimension)

    def take(self, rows: np.ndarray) -> SparseRows:
        """Return a copy of some rows, in the order of `rows`."""
        rows = np.asarray(rows, np.int64)
        counts = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        indices = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], counts)
        return SparseRows(self.words[indices], self.weights[indices], offsets, self.dimension)

    def stacked(self) -> np.ndarray:
        """Return the dense vectors [rows, 1, D]."""
        dense = np.zeros((len(self), 1, self.dimension), self.weights.dtype)
        dense[np.repeat(np.arange(len(self)), self.word_counts), 0, self.words] = self.weights
        return dense

    def padded(self, rows: Sequence[int] | np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (dense vectors [rows, length, D], mask [rows, length]), like `Ragged.padded`; row -1 is padding."""
        rows = np.asarray(rows, np.int64)
        items = np.zeros((len(rows), length, self.dimension), self.weights.dtype)
        mask = np.zeros((len(rows), length), bool)
        items[rows >= 0, 0], mask[rows >= 0, 0] = self.take(rows[rows >= 0]).stacked()[:, 0], True
        return items, mask

    def astype(self, dtype: Any) -> SparseRows:
        """Return the rows with weights of type `dtype`. A word whose weight becomes 0 is left out."""
        with np.errstate(over="ignore"):  # an infinity is an error where weights are stored
            weights = self.weights.astype(dtype)
        if (weights != 0).all():
            return SparseRows(self.words, weights, self.offsets, self.dimension)
        kept_counts = np.concatenate([[0], np.cumsum(weights != 0)])
        return SparseRows(self.words[weights != 0], weights[weights != 0], kept_counts[self.offsets], self.dimension)


def word_dtype(dimension: int) -> np.dtype:
    """Return the type of word ids below `dimension`, little-endian."""
    return np.dtype("<u2" if dimension <= 2**16 else "<u4")


TextVectors: TypeAlias = Ragged | SparseRows  # encoded texts
