"""Poolings of a passage's V vectors (MLR, "Pooling strategies"): none, average, scalar mix, self-contrastive.

Each takes Embeddings and whether this is training, and returns Embeddings. Queries are never pooled.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.types import Embeddings


class NoPooling(nn.Module):
    """Keeps all V vectors; the score of a passage is the maximum over them."""

    num_vectors: int

    def inference_vectors(self) -> int:
        return self.num_vectors

    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        return embeddings


class Average(nn.Module):
    """The mean of the vectors that exist."""

    num_vectors: int

    def inference_vectors(self) -> int:
        return 1

    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        exists = embeddings.mask[..., None]
        total = jnp.sum(jnp.where(exists, embeddings.vectors, 0), axis=1, keepdims=True)
        count = jnp.maximum(jnp.sum(exists, axis=1, keepdims=True), 1)
        return Embeddings(total / count, jnp.any(embeddings.mask, axis=1, keepdims=True))


class ScalarMix(nn.Module):
    """sum_k softmax(alpha)_k v_k with alpha [V] learned, zeros at the start (MLR eq. 8, without a scale gamma)."""

    num_vectors: int

    def inference_vectors(self) -> int:
        return 1

    @nn.compact
    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        alpha = self.param("alpha", nn.initializers.zeros, (self.num_vectors,))
        weights = jax.nn.softmax(alpha)
        mixed = jnp.einsum("v,bvd->bd", weights, embeddings.vectors, precision=jax.lax.Precision.HIGHEST)
        return Embeddings(mixed[:, None], jnp.any(embeddings.mask, axis=1, keepdims=True))


class SelfContrastive(nn.Module):
    """Training sees all V vectors (and the loss its local term); inference keeps vector 0, the last layer's."""

    num_vectors: int

    def inference_vectors(self) -> int:
        return 1

    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        if train:
            return embeddings
        return Embeddings(embeddings.vectors[:, :1], embeddings.mask[:, :1])


POOLINGS: dict[str, Any] = {
    "none": NoPooling,
    "average": Average,
    "scalar_mix": ScalarMix,
    "self_contrastive": SelfContrastive,
}
