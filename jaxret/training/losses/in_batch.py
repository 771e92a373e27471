"""In-batch losses: the terms of a step's loss, which stand in the table TERMS, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from jaxret.models.retriever import RetrieverModel
from jaxret.models.scoring import MASKED_SCORE
from jaxret.training.losses.group_losses import (
    BinarySettings,
    FalseNegativeSettings,
    KlSettings,
    MarginMseSettings,
    binary_cross_entropy,
    kl_divergence,
    loss_fields,
    margin_mse,
)
from jaxret.training.losses.matryoshka import MatryoshkaSettings, check_matryoshka
from jaxret.training.losses.sparsity import Sparsity, SparsitySettings
from jaxret.types import Batch, Scalar


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss: the keys of `config.loss`, and those that the head and the pooling bring along."""

    # whether the positive passage scores by its best vector or by its first (the last layer)
    positive: Literal["max", "first"] = "max"
    # the vector of the positive that its local softmax should choose
    local_target: Literal["none", "first", "argmax"] = "none"
    temperature: float = 1.0  # divides scores before the softmax over passages
    local_temperature: float = 1.0  # divides scores before the softmax over the positive's own vectors
    local_weight: float = 0.0  # of the local term, beside the contrastive one
    annealing_rate: float = 0.0  # of both temperatures, per epoch; 0: none
    annealing_floor: float = 0.3  # the least factor of annealing
    contrastive_weight: float = 1.0  # of the contrastive and the local term
    # whether a query competes for the passages of other queries too, or for its own alone
    in_batch_negatives: bool = True
    # negatives that are left out of the softmax by their scores
    false_negatives: FalseNegativeSettings = field(default_factory=FalseNegativeSettings)
    # (start, stop) of the parts of a vector that have a contrastive loss of their own
    parts: tuple[tuple[int, int], ...] = ()
    parts_weight: float = 0.5  # of the sum of these losses
    auxiliary_weight: float = 1.0  # of the loss that a head computes from a text alone
    auxiliary_decay: float = 1.0  # factor of that weight, per epoch
    epochs_per_step: float = 0.0  # batch size / number of examples
    kl: KlSettings = field(default_factory=KlSettings)  # distillation by Kullback-Leibler divergence
    in_batch_kl: KlSettings = field(default_factory=KlSettings)  # the same, of the scores of all passages of the batch
    margin_mse: MarginMseSettings = field(default_factory=MarginMseSettings)  # distillation of margins
    binary: BinarySettings = field(default_factory=BinarySettings)  # cross-entropy of yes and no
    # sizes of vectors that the loss is summed over
    matryoshka: MatryoshkaSettings = field(default_factory=MatryoshkaSettings)
    # penalties on the weights of words; its steps are counted in batches
    sparsity: SparsitySettings = field(default_factory=SparsitySettings)
    count_words: bool = False  # whether vectors are weights of words, to be counted

    def epoch(self, step: Int[jax.Array, ""] | int) -> Scalar:
        """Return the epoch, from 0, of the middle of a step's batch: a batch may begin in one and end in the next."""
        return jnp.floor((step + 0.5) * jnp.float32(self.epochs_per_step))

    def annealing(self, step: Int[jax.Array, ""] | int) -> Scalar | float:
        """Return the factor of both temperatures: max(floor, exp(-rate * epoch)) (MVR, section 3.3)."""
        if not self.annealing_rate:
            return 1.0
        return jnp.maximum(self.annealing_floor, jnp.exp(-self.annealing_rate * self.epoch(step)))


def loss_settings(config: ConfigDict, retriever: RetrieverModel, epochs_per_step: float = 0.0) -> LossSettings:
    """Return the loss of a config, its head and its pooling. Raises ValueError if they contradict each other."""
    loss, module = config.loss, retriever.module
    settings = LossSettings(
        **{**loss_fields(config), **module.head.loss_settings(), **module.pooling.LOSS}, epochs_per_step=epochs_per_step
    )
    if loss.local_weight and settings.local_target == "none":
        raise ValueError(
            f"loss.local_weight is {loss.local_weight}, but pooling {config.pooling!r} of head {config.head.name!r} "
            "has no local term: set it to 0"
        )
    check_matryoshka(settings.matryoshka, retriever)
    sparsity = settings.sparsity
    if (sparsity.query or sparsity.passage) and not settings.count_words:
        raise ValueError(
            f"loss.sparsity.query is {sparsity.query} and loss.sparsity.passage {sparsity.passage}, but the vectors of "
            f"head {config.head.name!r} are not weights of words: set both to 0"
        )
    batches = sparsity.steps * config.train.accumulate
    return replace(settings, sparsity=replace(sparsity, steps=batches))


def competing_passages(batch: Batch, in_batch_negatives: bool = True) -> Bool[jax.Array, "B N"]:
    """Return which passages the softmax of each query runs over: its positive, and every passage of the batch that
    exists and is not a known positive of it (another copy of its positive, another judged positive). Without
    `in_batch_negatives` its positive and its own hard negatives alone (I3 eq. 9), the N / B passages from its positive
    on."""
    relevant = jnp.any(batch.passage_ids[None, :, None] == batch.known_positives[:, None, :], axis=-1)
    exists = batch.passage_ids >= 0
    positive = jnp.arange(batch.passage_ids.shape[0])[None] == batch.positives[:, None]
    mask = positive | (exists[None] & ~relevant)
    if in_batch_negatives:
        return mask
    place = jnp.arange(batch.passage_ids.shape[0])[None] - batch.positives[:, None]
    return mask & (place >= 0) & (place < batch.passage_ids.shape[0] // batch.positives.shape[0])


@dataclass(frozen=True)
class Scores:
    """Similarities of every query with every passage of a batch, and everything else that terms of the loss read."""

    similarities: Float[jax.Array, "B N V"]  # S, in float32; MASKED_SCORE where a vector does not exist
    # index into N of each query's positive; -1 marks an empty row, which counts for nothing
    positives: Int[jax.Array, " B"]
    softmax_mask: Bool[jax.Array, "B N"]  # which passages the softmax of each query runs over
    settings: LossSettings
    annealing: Scalar | float = 1.0  # factor of both temperatures
    epoch: Scalar | float = 0.0  # from 0
    # (sum, count) of each passage, by its head; None: the head has no such loss
    auxiliary_loss: Float[jax.Array, "N 2"] | None = None
    # of the passages of each query, the positive first; NaN where a teacher gave none
    teacher_scores: Float[jax.Array, "B G"] | None = None
    parts: tuple[Float[jax.Array, "B N V"], ...] = ()  # S of each of `settings.parts` alone
    group_size: int = 0  # passages of a query, which stand together; 0: N / B
    sparsity: Sparsity | None = None  # of the batch's vectors; None: these are not weights of words
    passage_exists: Bool[jax.Array, " N"] | None = None  # False for empty slots
    # a teacher's scores of every query with every passage; None: there is no such teacher
    in_batch_teacher: Float[jax.Array, "B N"] | None = None
    # S of each smaller size of `settings.matryoshka`
    smaller: Mapping[int, Float[jax.Array, "B N V"]] = field(default_factory=dict)

    @cached_property
    def query_exists(self) -> Bool[jax.Array, " B"]:
        """False for empty rows."""
        return self.positives >= 0

    @cached_property
    def positive_columns(self) -> Int[jax.Array, " B"]:
        """Index into N of each query's positive; 0 for empty rows."""
        return jnp.maximum(self.positives, 0)

    def mean(self, values: Float[jax.Array, " B"]) -> Scalar:
        """Return the mean over the queries that exist."""
        return jnp.sum(jnp.where(self.query_exists, values, 0.0)) / jnp.maximum(jnp.sum(self.query_exists), 1)

    def positive_vectors(self, similarities: Float[jax.Array, "B N V"]) -> Float[jax.Array, "B V"]:
        """Return S[i,i+,:], the similarities of each query with the vectors of its positive."""
        return jnp.take_along_axis(similarities, self.positive_columns[:, None, None], axis=1)[:, 0]

    def of_passages(
        self, similarities: Float[jax.Array, "B N V"]
    ) -> tuple[Float[jax.Array, " B"], Float[jax.Array, "B N"]]:
        """Return the score of each query's positive, and the scores of all passages. A passage scores by its best
        vector; the positive as `settings.positive` says."""
        vectors = self.positive_vectors(similarities)
        positive = vectors[:, 0] if self.settings.positive == "first" else jnp.max(vectors, axis=-1)
        is_positive = jnp.arange(similarities.shape[1])[None] == self.positive_columns[:, None]
        return positive, jnp.where(is_positive, positive[:, None], jnp.max(similarities, axis=-1))

    def compete(
        self, similarities: Float[jax.Array, "B N V"]
    ) -> tuple[Float[jax.Array, " B"], Float[jax.Array, "B N"]]:
        """Return `of_passages`, with MASKED_SCORE for passages that do not compete."""
        positive, scores = self.of_passages(similarities)
        return positive, jnp.where(self.softmax_mask, scores, MASKED_SCORE)

    @cached_property
    def whole(self) -> tuple[Float[jax.Array, " B"], Float[jax.Array, "B N"]]:
        """`compete` by whole vectors."""
        return self.compete(self.similarities)

    def rank(self) -> Float[jax.Array, " B"]:
        """Return the rank, from 0, of each positive; of equal scores the first passage comes first."""
        positive, scores = self.whole[0][:, None], self.whole[1]
        first = jnp.arange(scores.shape[1])[None] < self.positive_columns[:, None]
        return jnp.sum((scores > positive) | ((scores == positive) & first), axis=-1).astype(jnp.float32)

    def group(self) -> tuple[Float[jax.Array, "B G"], Bool[jax.Array, "B G"]]:
        """Return the scores of each query with the passages of its own group, the positive first, and their mask."""
        size = self.group_size or self.softmax_mask.shape[1] // len(self.positives)
        columns = self.positive_columns[:, None] + jnp.arange(size)
        mask = jnp.take_along_axis(self.softmax_mask, columns, axis=1) & self.query_exists[:, None]
        return jnp.take_along_axis(self.whole[1], columns, axis=1), mask

    def teacher_group(self) -> tuple[Float[jax.Array, "B G"], Float[jax.Array, "B G"], Bool[jax.Array, "B G"]]:
        """Return student scores, teacher scores and a mask, each [B, G]. Queries without a scored positive and at least
        one scored negative are masked out; masked entries are 0."""
        assert self.teacher_scores is not None
        scores, mask = self.group()
        mask &= jnp.isfinite(self.teacher_scores)
        mask &= mask[:, :1] & (jnp.sum(mask, axis=1, keepdims=True) > 1)
        return jnp.where(mask, scores, 0.0), jnp.where(mask, self.teacher_scores, 0.0), mask

    def softmax_loss(self, positive: Float[jax.Array, " B"], scores: Float[jax.Array, "B N"]) -> Scalar:
        """Return mean_i -log softmax_j(score[i,:] / tau)[i+], of what `compete` returns, without masked
        negatives: those above score[i,i+] + margin (Qwen3-Embedding)."""
        if self.settings.false_negatives.masked:
            is_positive = jnp.arange(scores.shape[1])[None] == self.positive_columns[:, None]
            keep_mask = is_positive | (scores <= positive[:, None] + self.settings.false_negatives.margin)
            scores = jnp.where(keep_mask, scores, MASKED_SCORE)
        temperature = self.settings.temperature * self.annealing
        return self.mean(jax.nn.logsumexp(scores / temperature, axis=-1) - positive / temperature)


class Term(NamedTuple):
    """One addend of the loss: weight * value."""

    weight: Scalar | float
    value: Scalar


def contrastive_term(scores: Scores) -> Term:
    """Return mean_i -log softmax_j(score[i,:] / tau)[i+], with score[i,j] = max_k S[i,j,k]; score[i,i+] is S[i,i+,0]
    under positive="first" (MLR eq. 5)."""
    return Term(scores.settings.contrastive_weight, scores.softmax_loss(*scores.whole))


def local_term(scores: Scores) -> Term | None:
    """Return mean_i -log softmax_k(S[i,i+,:] / tau_local)[target]: MLR eq. 6 with target 0, MVR eq. 7 with argmax."""
    settings = scores.settings
    if settings.local_target == "none":
        return None
    vectors = scores.positive_vectors(scores.similarities)
    log_softmax = jax.nn.log_softmax(vectors / (settings.local_temperature * scores.annealing), axis=-1)
    first = settings.local_target == "first"
    target = jnp.zeros_like(scores.positive_columns) if first else jnp.argmax(vectors, axis=-1)
    loss = scores.mean(-jnp.take_along_axis(log_softmax, target[:, None], axis=-1)[:, 0])
    return Term(settings.contrastive_weight * settings.local_weight, loss)


def parts_term(scores: Scores) -> Term | None:
    """Return the sum of the contrastive losses of the parts of every vector alone (Aggretriever eq. 7)."""
    if not scores.parts:
        return None
    losses = (scores.softmax_loss(*scores.compete(similarities)) for similarities in scores.parts)
    return Term(scores.settings.parts_weight, sum(losses, jnp.zeros(())))


def reconstruction_term(scores: Scores) -> Term | None:
    """Return the mean of the head's auxiliary loss over the tokens of pseudo-queries (I3 eq. 10 and 11)."""
    if scores.auxiliary_loss is None:
        return None
    settings = scores.settings
    total, count = jnp.sum(scores.auxiliary_loss, axis=0)
    weight = settings.auxiliary_weight * jnp.float32(settings.auxiliary_decay) ** scores.epoch
    return Term(weight, total / jnp.maximum(count, 1))


def kl_term(scores: Scores) -> Term | None:
    """Return the divergence of the teacher's scores; None for a batch without them, as of a dev set."""
    settings = scores.settings.kl
    if not settings.weight or scores.teacher_scores is None:
        return None
    return Term(settings.weight, kl_divergence(*scores.teacher_group(), settings))


def in_batch_kl_term(scores: Scores) -> Term | None:
    """Return the divergence of a teacher's scores of every query with all passages of the batch (Lin et al. 2021,
    section 3); None without a teacher, as in validation.

    Scores are labels here, so known positives and second copies of a positive count as the teacher scores them.
    """
    settings = scores.settings.in_batch_kl
    if not settings.weight or scores.in_batch_teacher is None:
        return None
    assert scores.passage_exists is not None
    mask = scores.passage_exists[None] & scores.query_exists[:, None]
    student = scores.of_passages(scores.similarities)[1]
    return Term(settings.weight, kl_divergence(student, scores.in_batch_teacher, mask, settings))


def margin_mse_term(scores: Scores) -> Term | None:
    """Return the error of the teacher's margins; None for a batch without its scores."""
    weight = scores.settings.margin_mse.weight
    if not weight or scores.teacher_scores is None:
        return None
    return Term(weight, margin_mse(*scores.teacher_group()))


def binary_term(scores: Scores) -> Term | None:
    """Return the cross-entropy of yes and no over each query's own passages."""
    settings = scores.settings.binary
    return Term(settings.weight, binary_cross_entropy(*scores.group(), settings)) if settings.weight else None


def query_sparsity_term(scores: Scores) -> Term | None:
    """Return the penalty on the weights of the queries' words."""
    settings = scores.settings.sparsity
    if scores.sparsity is None or not settings.query:
        return None
    return Term(settings.query * scores.sparsity.growth, scores.sparsity.query)


def passage_sparsity_term(scores: Scores) -> Term | None:
    """Return the penalty on the weights of the passages' words, of positives and negatives alike."""
    settings = scores.settings.sparsity
    if scores.sparsity is None or not settings.passage:
        return None
    return Term(settings.passage * scores.sparsity.growth, scores.sparsity.passage)


# A term is None where it is off.
TERMS: dict[str, Callable[[Scores], Term | None]] = {
    "contrastive": contrastive_term,
    "local": local_term,
    "parts": parts_term,
    "reconstruction": reconstruction_term,
    "kl": kl_term,
    "in_batch_kl": in_batch_kl_term,
    "margin_mse": margin_mse_term,
    "binary": binary_term,
    "query_sparsity": query_sparsity_term,
    "passage_sparsity": passage_sparsity_term,
}
# Terms of texts alone, which a smaller size of vectors does not have again.
TEXT_TERMS = ("reconstruction", "query_sparsity", "passage_sparsity")


@struct.dataclass
class LossTerms:
    """Loss of a batch and its terms: scalars, means over the queries that exist."""

    loss: Scalar  # the weighted sum
    terms: dict[str, Scalar]  # values of the terms that are on, unweighted
    accuracy: Any = None  # how often the positive has the best score; None where nothing competes
    rank: Any = None  # mean rank of the positives, from 0; None where nothing competes
    # mean number of words of a query and of a passage, where vectors are weights of words
    words: dict[str, Scalar] = struct.field(default_factory=dict)


def make_terms(scores: Scores) -> dict[str, Term]:
    """Return the terms that are on; those of a smaller size of vectors are called NAME_SIZE."""
    whole = {name: term for name, make_term in TERMS.items() if (term := make_term(scores)) is not None}
    weight_of = scores.settings.matryoshka.weight_of
    if not weight_of:
        return whole
    weight = scores.settings.matryoshka.whole_weight
    terms = {
        name: Term(term.weight * (1.0 if name in TEXT_TERMS else weight), term.value) for name, term in whole.items()
    }
    for size, similarities in scores.smaller.items():
        of_size = make_terms(
            replace(
                scores,
                similarities=similarities,
                settings=replace(scores.settings, matryoshka=MatryoshkaSettings()),
                auxiliary_loss=None,
                sparsity=None,
                smaller={},
            )
        )
        terms |= {f"{name}_{size}": Term(term.weight * weight_of[size], term.value) for name, term in of_size.items()}
    return terms


def total_loss(scores: Scores) -> LossTerms:
    """Return the weighted sum of all terms that are on, over all sizes of vectors. Accuracy and rank are those of whole
    vectors."""
    terms = make_terms(scores)
    loss = sum((term.weight * term.value for term in terms.values()), jnp.zeros(()))
    rank = scores.rank()
    accuracy = scores.mean((rank == 0).astype(jnp.float32))
    words: dict[str, Scalar] = {}
    if scores.sparsity is not None:
        words = {"query_words": scores.sparsity.query_words, "passage_words": scores.sparsity.passage_words}
    values = {name: term.value for name, term in terms.items()}
    return LossTerms(loss, values, accuracy, scores.mean(rank), words)  # type: ignore[call-arg]
