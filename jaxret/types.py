"""The four types that carry everything: Tokens -> HiddenStates -> Embeddings, and a training Batch.

Axes have one letter everywhere: B queries, G documents per query, N = B * G documents in a step, T tokens,
L layers, H hidden size, K kept positions, V vectors per text, D vector size.
"""

from __future__ import annotations

from typing import Any, TypeAlias

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
    """V vectors for each text. `mask` is False for vectors that do not exist (padding)."""

    vectors: Float[Array, "B V D"]
    mask: Bool[Array, "B V"]


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
