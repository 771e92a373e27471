"""The loss of a step: terms that stand in one table, and their weights. What a family adds are settings and entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from jaxret.models.retriever import BiEncoder
from jaxret.scoring import MASKED
from jaxret.training.group_losses import Binary, Kl, MarginMse, binary, kl, loss_keys, margin_mse
from jaxret.types import Batch

Scalar = Float[jax.Array, ""]


@dataclass(frozen=True)
class LossSettings:
    """positive: whether the positive document scores by its best vector or by its first (the last layer).
    local_target: what the softmax over the positive's own vectors should choose. parts: where the parts of a vector
    begin and end that have a loss of their own. own: of the loss that a head computes from a text alone. Epochs are
    counted from 0."""

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
    own_weight: float = 1.0
    own_decay: float = 1.0
    epochs_per_step: float = 0.0  # batch size / number of examples
    kl: Kl = field(default_factory=Kl)
    margin_mse: MarginMse = field(default_factory=MarginMse)
    binary: Binary = field(default_factory=Binary)

    def epoch(self, step: Int[jax.Array, ""] | int) -> Scalar:
        """The epoch, from 0, of the middle of a step's batch: a batch may begin in one epoch and end in the next."""
        return jnp.floor((step + 0.5) * jnp.float32(self.epochs_per_step))

    def annealing(self, step: Int[jax.Array, ""] | int) -> Scalar | float:
        """What both temperatures are multiplied by: max(floor, exp(-rate * epoch)) (MVR, section 3.3)."""
        if not self.annealing_rate:
            return 1.0
        return jnp.maximum(self.annealing_floor, jnp.exp(-self.annealing_rate * self.epoch(step)))


def loss_settings(config: ConfigDict, retriever: BiEncoder, epochs_per_step: float = 0.0) -> LossSettings:
    """The config's loss, with what the pooling and the head are defined by."""
    loss, module = config.loss, retriever.module
    settings = LossSettings(
        **{**loss_keys(config), **module.head.loss(), **module.pooling.LOSS}, epochs_per_step=epochs_per_step
    )
    if loss.local_weight and settings.local_target == "none":
        raise ValueError(
            f"loss.local_weight is {loss.local_weight}, but pooling {config.pooling!r} of head {config.head.name!r} "
            "has no local term: set it to 0"
        )
    return settings


def candidates(batch: Batch) -> Bool[jax.Array, "B N"]:
    """Which documents compete for a query: its own positive, and every document of the batch that exists and is not
    known to be relevant to it (another copy of its positive, another judged positive)."""
    known = jnp.any(batch.document_ids[None, :, None] == batch.known_positives[:, None, :], axis=-1)
    exists = batch.document_ids >= 0
    own = jnp.arange(batch.document_ids.shape[0])[None] == batch.positives[:, None]
    return own | (exists[None] & ~known)


class Scores:
    """What the terms of the loss read: the scores of every query with every document, and where they come from.

    similarities: S [B,N,V] in float32 of a part of every vector, MASKED where a vector does not exist. positives: index
    into N; -1 marks a row that is no query and counts for nothing. annealing multiplies both temperatures. own_loss:
    (sum, count) for each document, or None. group: documents of a query, that stand together. teacher_scores: of these,
    the positive first, NaN where a teacher gave none.
    """

    def __init__(
        self,
        similarities: Callable[[slice], Float[jax.Array, "B N V"]],
        positives: Int[jax.Array, " B"],
        candidates: Bool[jax.Array, "B N"],
        settings: LossSettings,
        annealing: Scalar | float = 1.0,
        epoch: Scalar | float = 0.0,
        own_loss: Float[jax.Array, "N 2"] | None = None,
        teacher_scores: Float[jax.Array, "B G"] | None = None,
        group: int = 0,
    ) -> None:
        self.settings, self.epoch, self.own_loss, self.teacher_scores = settings, epoch, own_loss, teacher_scores
        self.temperature = settings.temperature * annealing
        self.local_temperature = settings.local_temperature * annealing
        self.valid = positives >= 0  # [B]
        self.row = jnp.maximum(positives, 0)
        self._candidates, self._similarities, self._group = candidates, similarities, group
        self.whole = self.part(slice(None))

    def mean(self, values: Float[jax.Array, " B"]) -> Scalar:
        """Over the queries that exist."""
        return jnp.sum(jnp.where(self.valid, values, 0.0)) / jnp.maximum(jnp.sum(self.valid), 1)

    def group(self) -> tuple[Float[jax.Array, "B G"], Bool[jax.Array, "B G"]]:
        """(scores, which count) of each query with its own documents, the positive first: beside `teacher_scores`."""
        columns = self.row[:, None] + jnp.arange(self._group or self.whole.best.shape[1] // len(self.row))
        there = jnp.take_along_axis(self._candidates, columns, axis=1) & self.valid[:, None]
        return jnp.take_along_axis(self.whole.scores, columns, axis=1), there

    def taught(self) -> tuple[Float[jax.Array, "B G"], Float[jax.Array, "B G"], Bool[jax.Array, "B G"]]:
        """(scores, the teacher's, which count) of the documents of each query that both scored; of a query whose
        positive, or all of whose negatives, the teacher did not score, none count. What does not count is 0."""
        assert self.teacher_scores is not None
        scores, there = self.group()
        there &= jnp.isfinite(self.teacher_scores)
        there &= there[:, :1] & (jnp.sum(there, axis=1, keepdims=True) > 1)
        return jnp.where(there, scores, 0.0), jnp.where(there, self.teacher_scores, 0.0), there

    def part(self, part: slice) -> PartScores:
        """Of a part of every vector."""
        similarities = self._similarities(part)
        own = jnp.take_along_axis(similarities, self.row[:, None, None], axis=1)[:, 0]  # [B,V]
        best = jnp.max(similarities, axis=-1)  # [B,N]
        positive = own[:, 0] if self.settings.positive == "first" else jnp.max(own, axis=-1)
        is_positive = jnp.arange(best.shape[1])[None] == self.row[:, None]
        scores = jnp.where(is_positive, positive[:, None], best)
        return PartScores(own, positive, scores, jnp.where(self._candidates, scores, MASKED))


@struct.dataclass
class PartScores:
    """own: S[i,i+,:], the vectors of each query's positive; positive: its score, by its best vector or its first;
    best: the score of every document; scores: the same, MASKED where it does not compete."""

    own: Float[jax.Array, "B V"]
    positive: Float[jax.Array, " B"]
    best: Float[jax.Array, "B N"]
    scores: Float[jax.Array, "B N"]

    def rank(self, row: Int[jax.Array, " B"]) -> Float[jax.Array, " B"]:
        """Of the positive among the candidates, from 0; of equal scores the first document comes first."""
        own_score = self.positive[:, None]
        first = jnp.arange(self.scores.shape[1])[None] < row[:, None]
        return jnp.sum((self.scores > own_score) | ((self.scores == own_score) & first), axis=-1).astype(jnp.float32)


def contrastive(scores: Scores, part: PartScores | None = None) -> Scalar:
    """mean_i -log softmax_j(score[i,:] / tau)[i+], with score[i,j] = max_k S[i,j,k]; score[i,i+] is S[i,i+,0] under
    positive="first" (MLR eq. 5)."""
    part = part or scores.whole
    return scores.mean(jax.nn.logsumexp(part.scores / scores.temperature, axis=-1) - part.positive / scores.temperature)


def local(scores: Scores) -> Scalar:
    """mean_i -log softmax_k(S[i,i+,:] / tau_local)[target]: MLR eq. 6 with target 0, MVR eq. 7 with argmax."""
    own = scores.whole.own
    logits = jax.nn.log_softmax(own / scores.local_temperature, axis=-1)
    first = scores.settings.local_target == "first"
    target = jnp.zeros_like(scores.row) if first else jnp.argmax(own, axis=-1)
    return scores.mean(-jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0])


def parts(scores: Scores) -> Scalar:
    """The sum of the contrastive losses of the parts of every vector alone (Aggretriever eq. 7)."""
    return sum((contrastive(scores, scores.part(slice(*part))) for part in scores.settings.parts), jnp.zeros(()))


def reconstruction(scores: Scores) -> Scalar:
    """Mean over the tokens of pseudo-queries of what the head says of each text alone (I3 eq. 10)."""
    assert scores.own_loss is not None
    total, count = jnp.sum(scores.own_loss, axis=0)
    return total / jnp.maximum(count, 1)


class Term(NamedTuple):
    """One addend of the loss: weight * value, in a step where it is `on`."""

    value: Callable[[Scores], Scalar]
    weight: Callable[[Scores], Scalar | float]
    on: Callable[[Scores], bool]


TERMS: dict[str, Term] = {
    "contrastive": Term(contrastive, lambda s: s.settings.contrastive_weight, lambda s: True),
    "local": Term(
        local,
        lambda s: s.settings.contrastive_weight * s.settings.local_weight,
        lambda s: s.settings.local_target != "none",
    ),
    "parts": Term(parts, lambda s: s.settings.parts_weight, lambda s: bool(s.settings.parts)),
    "reconstruction": Term(
        reconstruction,
        lambda s: s.settings.own_weight * jnp.float32(s.settings.own_decay) ** s.epoch,
        lambda s: s.own_loss is not None,
    ),
    "kl": Term(
        lambda s: kl(*s.taught(), s.settings.kl),
        lambda s: s.settings.kl.weight,
        lambda s: bool(s.settings.kl.weight) and s.teacher_scores is not None,  # a dev set may have none
    ),
    "margin_mse": Term(
        lambda s: margin_mse(*s.taught()),
        lambda s: s.settings.margin_mse.weight,
        lambda s: bool(s.settings.margin_mse.weight) and s.teacher_scores is not None,
    ),
    "binary": Term(
        lambda s: binary(*s.group(), s.settings.binary),
        lambda s: s.settings.binary.weight,
        lambda s: bool(s.settings.binary.weight),
    ),
}


@struct.dataclass
class LossTerms:
    """Scalars; means over the queries that exist. `terms` are those of TERMS that are on, unweighted. Where nothing
    competes there is neither accuracy nor rank."""

    loss: Scalar
    terms: dict[str, Scalar]
    accuracy: Any = None  # how often the positive has the best score
    rank: Any = None  # its rank among the candidates, from 0


def total_loss(scores: Scores) -> LossTerms:
    """The sum of all terms that are on."""
    values = {name: term.value(scores) for name, term in TERMS.items() if term.on(scores)}
    loss = sum((TERMS[name].weight(scores) * value for name, value in values.items()), jnp.zeros(()))
    rank = scores.whole.rank(scores.row)
    return LossTerms(loss, values, scores.mean((rank == 0).astype(jnp.float32)), scores.mean(rank))
