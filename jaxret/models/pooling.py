"""Poolings of a passage's V vectors (MLR, "Pooling strategies"): none, average, scalar mix, self-contrastive.

A pooling maps (Embeddings, whether this is training) to Embeddings. Queries are never pooled. `weights(count, params)`
returns the weights of `count` vectors in the pooled vector at inference, or None if several vectors remain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.models.encoders.layers import MASKED_LOGIT
from jaxret.types import Embeddings


class Pooling(nn.Module):
    """The base of poolings. A pooling makes one vector from a passage's vectors, unless it overrides this."""

    num_vectors: int | None  # vectors of a passage before pooling; None: the number depends on the text
    LOSS: ClassVar[dict[str, str]] = {}  # fields of `training.losses.LossSettings` that the pooling sets

    def inference_vectors(self) -> int | None:
        """Return the number of vectors of a passage in a search; None: the number depends on the text."""
        return 1


class NoPooling(Pooling):
    """Keeps all V vectors. The score of a passage is the maximum over its vectors."""

    def inference_vectors(self) -> int | None:
        return self.num_vectors

    @staticmethod
    def weights(count: int, params: Any) -> list[float] | None:
        return [1.0] if count == 1 else None

    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        return embeddings


class Average(Pooling):
    """The mean of the vectors that exist."""

    @staticmethod
    def weights(count: int, params: Any) -> list[float]:
        return [1.0 / count] * count

    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        exists = embeddings.mask[..., None]
        total = jnp.sum(jnp.where(exists, embeddings.vectors, 0), axis=1, keepdims=True)
        count = jnp.maximum(jnp.sum(exists, axis=1, keepdims=True), 1)
        return replace(embeddings, vectors=total / count, mask=jnp.any(embeddings.mask, axis=1, keepdims=True))


class ScalarMix(Pooling):
    """sum_k softmax(alpha)_k v_k with learned alpha [V], zeros at the start (MLR eq. 8, without a scale gamma). The
    softmax is over the vectors that exist."""

    @staticmethod
    def weights(count: int, params: Any) -> list[float]:
        return jax.nn.softmax(jnp.asarray(params["alpha"])).tolist()

    @nn.compact
    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        alpha = self.param("alpha", nn.initializers.zeros, (self.num_vectors,))
        weights = jax.nn.softmax(jnp.where(embeddings.mask, alpha, MASKED_LOGIT), axis=-1)  # [B,V]
        mixture = jnp.einsum("bv,bvd->bd", weights, embeddings.vectors, precision=jax.lax.Precision.HIGHEST)
        return replace(embeddings, vectors=mixture[:, None], mask=jnp.any(embeddings.mask, axis=1, keepdims=True))


class SelfContrastive(Pooling):
    """Training keeps all V vectors, and the loss has a local term (MLR eq. 5-6). Inference keeps vector 0, which comes
    from the last layer."""

    LOSS: ClassVar[dict[str, str]] = {"positive": "first", "local_target": "first"}

    @staticmethod
    def weights(count: int, params: Any) -> list[float]:
        return [1.0] + [0.0] * (count - 1)

    def __call__(self, embeddings: Embeddings, train: bool) -> Embeddings:
        if train:
            return embeddings
        return replace(embeddings, vectors=embeddings.vectors[:, :1], mask=embeddings.mask[:, :1])


POOLINGS: dict[str, Any] = {
    "none": NoPooling,
    "average": Average,
    "scalar_mix": ScalarMix,
    "self_contrastive": SelfContrastive,
}
