"""One contrastive loss for every family; what a family adds to it are settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from jaxret.models.retriever import Retriever
from jaxret.scoring import MASKED
from jaxret.types import Batch


@dataclass(frozen=True)
class LossSettings:
    """positive: whether the positive document scores by its best vector or by its first (the last layer).
    local_target: what the softmax over the positive's own vectors should choose. parts: where the parts of a vector
    begin and end that have a loss of their own (Aggretriever). Epochs are counted from 0."""

    positive: Literal["max", "first"] = "max"
    local_target: Literal["none", "first", "argmax"] = "none"
    temperature: float = 1.0
    local_temperature: float = 1.0
    local_weight: float = 0.0
    annealing_rate: float = 0.0
    annealing_floor: float = 0.3
    contrastive_weight: float = 1.0
    parts: tuple[tuple[int, int], ...] = ()
    parts_weight: float = 0.5
    reconstruction_weight: float = 1.0
    reconstruction_decay: float = 0.1
    epochs_per_step: float = 0.0  # batch size / number of examples

    def epoch(self, step: Int[jax.Array, ""] | int) -> Float[jax.Array, ""]:
        """The epoch, from 0, of the middle of a step's batch: a batch may begin in one epoch and end in the next."""
        return jnp.floor((step + 0.5) * jnp.float32(self.epochs_per_step))

    def annealing(self, step: Int[jax.Array, ""] | int) -> Float[jax.Array, ""] | float:
        """What both temperatures are multiplied by: max(floor, exp(-rate * epoch)) (MVR, section 3.3)."""
        if not self.annealing_rate:
            return 1.0
        return jnp.maximum(self.annealing_floor, jnp.exp(-self.annealing_rate * self.epoch(step)))

    def reconstruction(self, step: Int[jax.Array, ""] | int) -> Float[jax.Array, ""]:
        """beta of the reconstruction loss: weight * decay^epoch (I3 eq. 7)."""
        return self.reconstruction_weight * jnp.float32(self.reconstruction_decay) ** self.epoch(step)


@struct.dataclass
class LossTerms:
    """Scalars; means over the queries that exist."""

    loss: Float[jax.Array, ""]
    contrastive: Float[jax.Array, ""]
    local: Float[jax.Array, ""]
    parts: Float[jax.Array, ""]  # sum over the parts of a vector (Aggretriever)
    reconstruction: Float[jax.Array, ""]  # mean over the tokens of pseudo-queries (I3)
    accuracy: Float[jax.Array, ""]  # how often the positive has the best score
    rank: Float[jax.Array, ""]  # its rank among the candidates, from 0; of equal scores the first document comes first


def loss_settings(config: ConfigDict, retriever: Retriever, epochs_per_step: float = 0.0) -> LossSettings:
    """The self-contrastive pooling is defined by its loss (MLR eq. 5-6), and so are viewers (MVR eq. 7)."""
    loss = config.loss
    if loss.temperature <= 0 or loss.local_temperature <= 0 or loss.annealing_floor <= 0:
        raise ValueError(
            f"loss.temperature {loss.temperature}, loss.local_temperature {loss.local_temperature} and "
            f"loss.annealing_floor {loss.annealing_floor} must be positive"
        )
    own, viewers = config.pooling == "self_contrastive", config.head.name == "viewers"
    if loss.local_weight and not (own or viewers):
        raise ValueError(
            f"loss.local_weight is {loss.local_weight}, but pooling {config.pooling!r} of head {config.head.name!r} "
            "has no local term; it belongs to pooling self_contrastive and head viewers"
        )
    head = retriever.module.head
    return LossSettings(
        positive="first" if own else "max",
        local_target="first" if own else "argmax" if viewers else "none",
        temperature=loss.temperature,
        local_temperature=loss.local_temperature,
        local_weight=loss.local_weight,
        annealing_rate=loss.annealing_rate,
        annealing_floor=loss.annealing_floor,
        contrastive_weight=loss.contrastive_weight,
        parts=head.parts() if hasattr(head, "parts") else (),
        parts_weight=loss.parts_weight,
        reconstruction_weight=loss.reconstruction_weight,
        reconstruction_decay=loss.reconstruction_decay,
        epochs_per_step=epochs_per_step,
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
    annealing: Float[jax.Array, ""] | float = 1.0,
) -> LossTerms:
    """L = L_global + lambda * L_local, with s[i,j] = max_k S[i,j,k] and i+ the positive of query i:

    L_global = mean_i -log softmax_j(score[i,:] / tau)[i+], where score[i,i+] is S[i,i+,0] under positive="first";
    L_local  = mean_i -log softmax_k(S[i,i+,:] / tau_local)[target]   (MLR eq. 6 with target 0, MVR eq. 7 with argmax).

    similarities: S in float32, MASKED where a vector does not exist. positives: index into N; -1 marks a row that is
    no query and counts for nothing. annealing: multiplies both temperatures.
    """
    temperature, local_temperature = settings.temperature * annealing, settings.local_temperature * annealing
    valid = positives >= 0
    row = jnp.maximum(positives, 0)
    own = jnp.take_along_axis(similarities, row[:, None, None], axis=1)[:, 0]  # [B,V]
    best = jnp.max(similarities, axis=-1)  # [B,N]
    positive_score = own[:, 0] if settings.positive == "first" else jnp.max(own, axis=-1)
    is_positive = jnp.arange(best.shape[1])[None] == row[:, None]
    scores = jnp.where(is_positive, positive_score[:, None], best)
    scores = jnp.where(candidates, scores, MASKED)
    negative_log = jax.nn.logsumexp(scores / temperature, axis=-1) - positive_score / temperature

    local = jnp.zeros_like(negative_log)
    if settings.local_target != "none":
        logits = jax.nn.log_softmax(own / local_temperature, axis=-1)
        target = jnp.zeros_like(row) if settings.local_target == "first" else jnp.argmax(own, axis=-1)
        local = -jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]

    def mean(values: Float[jax.Array, " B"]) -> Float[jax.Array, ""]:
        return jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(jnp.sum(valid), 1)

    contrastive, local_mean = mean(negative_log), mean(local)
    own_score = positive_score[:, None]
    ahead = (scores > own_score) | ((scores == own_score) & (jnp.arange(scores.shape[1])[None] < row[:, None]))
    rank = jnp.sum(ahead, axis=-1).astype(jnp.float32)
    loss, zero = contrastive + settings.local_weight * local_mean, jnp.zeros(())
    return LossTerms(loss, contrastive, local_mean, zero, zero, mean((rank == 0).astype(jnp.float32)), mean(rank))
