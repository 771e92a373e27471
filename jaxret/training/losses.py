"""One contrastive loss for DPR, MLR, ME-BERT, ColBERT with one query vector, and MVR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from jaxret.scoring import MASKED
from jaxret.types import Batch


@dataclass(frozen=True)
class LossSettings:
    """positive: whether the positive document scores by its best vector or by its first (the last layer).
    local_target: what the softmax over the positive's own vectors should choose."""

    positive: Literal["max", "first"] = "max"
    local_target: Literal["none", "first", "argmax"] = "none"
    temperature: float = 1.0
    local_temperature: float = 1.0
    local_weight: float = 0.0


@struct.dataclass
class LossTerms:
    """Scalars; means over the queries that exist."""

    loss: Float[jax.Array, ""]
    contrastive: Float[jax.Array, ""]
    local: Float[jax.Array, ""]
    accuracy: Float[jax.Array, ""]  # how often the positive has the best score


def loss_settings(config: ConfigDict) -> LossSettings:
    """The self-contrastive pooling is defined by its loss (MLR eq. 5-6); every other one is plain contrastive."""
    if config.loss.temperature <= 0 or config.loss.local_temperature <= 0:
        raise ValueError(
            f"loss.temperature {config.loss.temperature} and loss.local_temperature {config.loss.local_temperature} "
            f"must be positive"
        )
    own = config.pooling == "self_contrastive"
    return LossSettings(
        positive="first" if own else "max",
        local_target="first" if own else "none",
        temperature=config.loss.temperature,
        local_temperature=config.loss.local_temperature,
        local_weight=config.loss.local_weight,
    )


def candidates(batch: Batch) -> Bool[jax.Array, "B N"]:
    """Which documents compete for a query: its own positive, and every document of the batch that exists and is not
    known to be relevant to it (another copy of its positive, another judged positive)."""
    known = jnp.any(batch.document_ids[None, :, None] == batch.known_positives[:, None, :], axis=-1)
    exists = batch.document_ids >= 0
    own = jnp.arange(batch.document_ids.shape[0])[None] == batch.positives[:, None]
    return own | (exists[None] & ~known)


def contrastive_loss(
    similarities: Float[jax.Array, "B N V"],
    positives: Int[jax.Array, " B"],
    candidates: Bool[jax.Array, "B N"],
    settings: LossSettings,
) -> LossTerms:
    """L = L_global + lambda * L_local, with s[i,j] = max_k S[i,j,k] and i+ the positive of query i:

    L_global = mean_i -log softmax_j(score[i,:] / tau)[i+], where score[i,i+] is S[i,i+,0] under positive="first";
    L_local  = mean_i -log softmax_k(S[i,i+,:] / tau_local)[target]   (MLR eq. 6 with target 0, MVR eq. 7 with argmax).

    similarities: S in float32, MASKED where a vector does not exist. positives: index into N; -1 marks a row that is
    no query and counts for nothing.
    """
    valid = positives >= 0
    row = jnp.maximum(positives, 0)
    own = jnp.take_along_axis(similarities, row[:, None, None], axis=1)[:, 0]  # [B,V]
    best = jnp.max(similarities, axis=-1)  # [B,N]
    positive_score = own[:, 0] if settings.positive == "first" else jnp.max(own, axis=-1)
    is_positive = jnp.arange(best.shape[1])[None] == row[:, None]
    scores = jnp.where(is_positive, positive_score[:, None], best)
    scores = jnp.where(candidates, scores, MASKED)
    negative_log = jax.nn.logsumexp(scores / settings.temperature, axis=-1) - positive_score / settings.temperature

    local = jnp.zeros_like(negative_log)
    if settings.local_target != "none":
        logits = jax.nn.log_softmax(own / settings.local_temperature, axis=-1)
        target = jnp.zeros_like(row) if settings.local_target == "first" else jnp.argmax(own, axis=-1)
        local = -jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]

    def mean(values: Float[jax.Array, " B"]) -> Float[jax.Array, ""]:
        return jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(jnp.sum(valid), 1)

    contrastive, local_mean = mean(negative_log), mean(local)
    hit = (jnp.argmax(scores, axis=-1) == row).astype(jnp.float32)
    return LossTerms(contrastive + settings.local_weight * local_mean, contrastive, local_mean, mean(hit))
