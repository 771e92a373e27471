"""The four types that carry everything: Tokens -> HiddenStates -> Embeddings, and a training Batch.

Axes have one letter everywhere: B queries, G documents per query, N = B * G documents in a step, T tokens,
L layers, H hidden size, K kept positions, V vectors per text, D vector size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

Array: TypeAlias = Any  # jax.Array on a device, np.ndarray still on the host


@struct.dataclass
class Tokens:
    """Padded token ids, texts on the first axis; padding is on the right."""

    ids: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


@struct.dataclass
class HiddenStates:
    """What the encoder kept of every layer; layer 0 is the output of the embeddings."""

    states: Float[Array, "layers B K H"]
    mask: Bool[Array, "B K"]


@struct.dataclass
class Embeddings:
    """V vectors for each text. `mask` is False for vectors that do not exist (padding). `own_loss` is a (sum, count)
    for each text of a loss that needs no other text (I3's reconstruction), or None."""

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


VECTOR_DTYPES = ("float32", "float16")  # of vectors on disk


@dataclass(frozen=True)
class VectorLists:
    """Texts with their own numbers of vectors, on the host: those of text i are `flat[offsets[i]:offsets[i + 1]]`."""

    flat: np.ndarray  # [R,D]
    offsets: np.ndarray  # int64 [texts + 1]

    @classmethod
    def of(cls, vectors: np.ndarray) -> VectorLists:
        """[texts,V,D] as lists of V."""
        texts, count, dimension = vectors.shape
        return cls(vectors.reshape(-1, dimension), np.arange(texts + 1) * count)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, text: int | np.integer) -> np.ndarray:
        """[V,D] of one text."""
        return self.flat[self.offsets[text] : self.offsets[text + 1]]

    @property
    def counts(self) -> np.ndarray:
        """V of each text, int64 [texts]."""
        return np.diff(self.offsets)

    def stacked(self) -> np.ndarray:
        """[texts,V,D] of texts that all have V vectors. Raises ValueError if they do not."""
        counts = np.unique(self.counts) if len(self) else np.ones(1, np.int64)
        if len(counts) > 1:
            raise ValueError(f"texts have {counts[0]} to {counts[-1]} vectors; they cannot be stacked")
        return self.flat.reshape(len(self), counts[0], self.flat.shape[1])

    def take(self, texts: np.ndarray) -> VectorLists:
        """The lists of some texts, copied, in the order given."""
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(self.counts[texts], out=offsets[1:])
        flat = np.empty((int(offsets[-1]), self.flat.shape[1]), self.flat.dtype)
        for i, text in enumerate(texts):
            flat[offsets[i] : offsets[i + 1]] = self[text]
        return VectorLists(flat, offsets)

    def padded(self, length: int, texts: int) -> tuple[np.ndarray, np.ndarray]:
        """(float32 [texts,length,D], mask [texts,length]), padded with zeros and with empty texts."""
        mask = np.zeros((texts, length), bool)
        mask[: len(self)] = np.arange(length) < self.counts[:, None]
        vectors = np.zeros((texts, length, self.flat.shape[1]), np.float32)
        vectors[mask] = self.flat
        return vectors, mask

    def astype(self, dtype: Any) -> VectorLists:
        return VectorLists(self.flat.astype(dtype), self.offsets)
