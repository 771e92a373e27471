"""In-batch losses: the terms of a batch's loss (table TERMS) and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from jaxret.models.retriever_model import RetrieverModel
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
    """Settings of the loss: the keys of `config.loss`, and the `loss_settings` of the head and the pooling."""

    # score of the positive passage: by its best vector, or by its first (the last layer)
    positive: Literal["max", "first"] = "max"
    # the vector of the positive that its local softmax should choose
    local_target: Literal["none", "first", "argmax"] = "none"
    temperature: float = 1.0  # divides scores before the softmax over passages
    local_temperature: float = 1.0  # divides scores before the softmax over the positive's own vectors
    local_weight: float = 0.0  # weight of the local term, relative to the contrastive term
    annealing_rate: float = 0.0  # rate at which both temperatures fall, per epoch; 0: they are constant
    annealing_floor: float = 0.3  # the least factor of annealing
    contrastive_weight: float = 1.0  # weight of the contrastive and the local term
    # whether the passages of other queries of the batch are negatives, too
    in_batch_negatives: bool = True
    # negatives whose scores leave them out of the softmax
    false_negatives: FalseNegativeSettings = field(default_factory=FalseNegativeSettings)
    # (start, stop) of the parts of a vector that each have a contrastive loss
    parts: tuple[tuple[int, int], ...] = ()
    parts_weight: float = 0.5  # weight of the sum of these losses
    auxiliary_weight: float = 1.0  # weight of the loss that a head computes from single texts
    auxiliary_decay: float = 1.0  # factor of auxiliary_weight, per epoch
    epochs_per_batch: float = 0.0  # batch size / number of examples
    kl: KlSettings = field(default_factory=KlSettings)  # distillation by Kullback-Leibler divergence
    # Distillation of the scores of all passages of the batch.
    in_batch_kl: KlSettings = field(default_factory=KlSettings)
    margin_mse: MarginMseSettings = field(default_factory=MarginMseSettings)  # distillation of margins
    binary: BinarySettings = field(default_factory=BinarySettings)  # binary cross-entropy
    # sizes of vectors over which the loss is summed
    matryoshka: MatryoshkaSettings = field(default_factory=MatryoshkaSettings)
    # penalties on the weights of words; `steps` counts batches
    sparsity: SparsitySettings = field(default_factory=SparsitySettings)
    count_words: bool = False  # whether vectors are weights of words, which are counted

    def epoch(self, batch_number: Int[jax.Array, ""] | int) -> Scalar:
        """Return the epoch, from 0, of the middle of a batch, because a batch may begin in one epoch and end in the
        next."""
        return jnp.floor((batch_number + 0.5) * jnp.float32(self.epochs_per_batch))

    def annealing(self, batch_number: Int[jax.Array, ""] | int) -> Scalar | float:
        """Return the factor of both temperatures: max(floor, exp(-rate * epoch)) (MVR, section 3.3)."""
        if not self.annealing_rate:
            return 1.0
        return jnp.maximum(self.annealing_floor, jnp.exp(-self.annealing_rate * self.epoch(batch_number)))


def loss_settings(config: ConfigDict, retriever: RetrieverModel, epochs_per_batch: float = 0.0) -> LossSettings:
    """Return the loss of a config, its head and its pooling. Raises ValueError if they contradict each other."""
    loss, module = config.loss, retriever.module
    settings = LossSettings(
        **{**loss_fields(config), **module.head.loss_settings(), **module.pooling.LOSS},
        epochs_per_batch=epochs_per_batch,
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
    return replace(settings, sparsity=replace(sparsity, batches_per_step=config.train.accumulate))


def competing_passages(batch: Batch, in_batch_negatives: bool = True) -> Bool[jax.Array, "B N"]:
    """Return a mask of the passages in the softmax of each query.

    These are its positive, and all passages of the batch that exist and are not known positives of the query (another
    copy of its positive, another judged positive). Without `in_batch_negatives` they are only its positive and its own
    hard negatives (I3 eq. 9): the N / B passages that begin with its positive.
    """
    relevant = jnp.any(batch.passage_ids[None, :, None] == batch.known_positives[:, None, :], axis=-1)
    exists = batch.passage_ids >= 0
    positive = jnp.arange(batch.passage_ids.shape[0])[None] == batch.positives[:, None]
    mask = positive | (exists[None] & ~relevant)
    if in_batch_negatives:
        return mask
    offset = jnp.arange(batch.passage_ids.shape[0])[None] - batch.positives[:, None]
    return mask & (offset >= 0) & (offset < batch.passage_ids.shape[0] // batch.positives.shape[0])


@dataclass(frozen=True)
class Scores:
    """Similarities of every query with every passage of a batch, and the other values that terms of the loss read."""

    similarities: Float[jax.Array, "B N V"]  # S, in float32; MASKED_SCORE if a vector does not exist
    # index into N of each query's positive; -1 marks an empty row, which is ignored
    positives: Int[jax.Array, " B"]
    softmax_mask: Bool[jax.Array, "B N"]  # the passages in the softmax of each query
    settings: LossSettings
    annealing: Scalar | float = 1.0  # factor of both temperatures
    epoch: Scalar | float = 0.0  # number of the epoch, from 0
    # (sum, count) of the head's loss for each passage; None: the head has no such loss
    auxiliary_loss: Float[jax.Array, "N 2"] | None = None
    # a teacher's scores of the passages of each query, positive first; NaN without a score; None: no teacher
    teacher_scores: Float[jax.Array, "B G"] | None = None
    parts: tuple[Float[jax.Array, "B N V"], ...] = ()  # S computed from each of `settings.parts`
    group_size: int = 0  # number of passages of a query, which are adjacent; 0: N / B
    sparsity: Sparsity | None = None  # penalties on the batch's vectors; None: these are not weights of words
    passage_exists: Bool[jax.Array, " N"] | None = None  # False for empty slots
    # a teacher's scores of every query with every passage; None: no such teacher
    in_batch_teacher: Float[jax.Array, "B N"] | None = None
    # size -> S of vectors of this size, for the smaller sizes of `settings.matryoshka`
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
        """Return the score of each query's positive, and the scores of all passages. The score of a passage is the
        score of its best vector; `settings.positive` defines the score of the positive."""
        vectors = self.positive_vectors(similarities)
        positive = vectors[:, 0] if self.settings.positive == "first" else jnp.max(vectors, axis=-1)
        is_positive = jnp.arange(similarities.shape[1])[None] == self.positive_columns[:, None]
        return positive, jnp.where(is_positive, positive[:, None], jnp.max(similarities, axis=-1))

    def compete(
        self, similarities: Float[jax.Array, "B N V"]
    ) -> tuple[Float[jax.Array, " B"], Float[jax.Array, "B N"]]:
        """Return the results of `of_passages`, with MASKED_SCORE for passages outside of the softmax."""
        positive, scores = self.of_passages(similarities)
        return positive, jnp.where(self.softmax_mask, scores, MASKED_SCORE)

    @cached_property
    def full_size(self) -> tuple[Float[jax.Array, " B"], Float[jax.Array, "B N"]]:
        """The results of `compete` for vectors of full size."""
        return self.compete(self.similarities)

    def rank(self) -> Float[jax.Array, " B"]:
        """Return the rank, from 0, of each positive. If scores are equal, the passage with the lower index is first."""
        positive, scores = self.full_size[0][:, None], self.full_size[1]
        first = jnp.arange(scores.shape[1])[None] < self.positive_columns[:, None]
        return jnp.sum((scores > positive) | ((scores == positive) & first), axis=-1).astype(jnp.float32)

    def group(self) -> tuple[Float[jax.Array, "B G"], Bool[jax.Array, "B G"]]:
        """Return the scores of each query with the passages of its own group, the positive first, and their mask."""
        size = self.group_size or self.softmax_mask.shape[1] // len(self.positives)
        columns = self.positive_columns[:, None] + jnp.arange(size)
        mask = jnp.take_along_axis(self.softmax_mask, columns, axis=1) & self.query_exists[:, None]
        return jnp.take_along_axis(self.full_size[1], columns, axis=1), mask

    def teacher_group(self) -> tuple[Float[jax.Array, "B G"], Float[jax.Array, "B G"], Bool[jax.Array, "B G"]]:
        """Return student scores, teacher scores and a mask, each [B, G]. Queries without a scored positive and at least
        one scored negative are masked out; masked entries are 0."""
        assert self.teacher_scores is not None
        scores, mask = self.group()
        mask &= jnp.isfinite(self.teacher_scores)
        mask &= mask[:, :1] & (jnp.sum(mask, axis=1, keepdims=True) > 1)
        return jnp.where(mask, scores, 0.0), jnp.where(mask, self.teacher_scores, 0.0), mask

    def softmax_loss(self, positive: Float[jax.Array, " B"], scores: Float[jax.Array, "B N"]) -> Scalar:
        """Return mean_i -log softmax_j(score[i,:] / tau)[i+] of the results of `compete`.

        With `settings.false_negatives.masked`, negatives with a score above score[i,i+] + margin are left out
        (Qwen3-Embedding).
        """
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
    """Return mean_i -log softmax_j(score[i,:] / tau)[i+], with score[i,j] = max_k S[i,j,k]. If `positive` is "first",
    score[i,i+] is S[i,i+,0] (MLR eq. 5)."""
    return Term(scores.settings.contrastive_weight, scores.softmax_loss(*scores.full_size))


def local_term(scores: Scores) -> Term | None:
    """Return mean_i -log softmax_k(S[i,i+,:] / tau_local)[target]. The target is 0 in MLR (eq. 6), argmax in MVR (eq.
    7)."""
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
    """Return the sum of the contrastive losses of each part of the vectors (Aggretriever eq. 7)."""
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
    """Return the divergence from the teacher's scores; None for a batch without them, such as a batch of a dev set."""
    settings = scores.settings.kl
    if not settings.weight or scores.teacher_scores is None:
        return None
    return Term(settings.weight, kl_divergence(*scores.teacher_group(), settings))


def in_batch_kl_term(scores: Scores) -> Term | None:
    """Return the divergence from a teacher's scores of every query with all passages of the batch (Lin et al. 2021,
    section 3); None without a teacher, and in validation.

    The teacher's scores are labels, so known positives and second copies of a positive are not left out.
    """
    settings = scores.settings.in_batch_kl
    if not settings.weight or scores.in_batch_teacher is None:
        return None
    assert scores.passage_exists is not None
    mask = scores.passage_exists[None] & scores.query_exists[:, None]
    student = scores.of_passages(scores.similarities)[1]
    return Term(settings.weight, kl_divergence(student, scores.in_batch_teacher, mask, settings))


def margin_mse_term(scores: Scores) -> Term | None:
    """Return the error of the margins against the teacher's; None for a batch without a teacher's scores."""
    weight = scores.settings.margin_mse.weight
    if not weight or scores.teacher_scores is None:
        return None
    return Term(weight, margin_mse(*scores.teacher_group()))


def binary_term(scores: Scores) -> Term | None:
    """Return the binary cross-entropy over each query's own passages."""
    settings = scores.settings.binary
    return Term(settings.weight, binary_cross_entropy(*scores.group(), settings)) if settings.weight else None


def sparsity_term(side: Literal["query", "passage"], scores: Scores) -> Term | None:
    """Return the penalty on the weights of the words of queries, or of passages, positives and negatives."""
    weight = getattr(scores.settings.sparsity, side)
    if scores.sparsity is None or not weight:
        return None
    return Term(weight * scores.sparsity.growth, getattr(scores.sparsity, side))


# Name of a term -> its function, which returns None if the term is off.
TERMS: dict[str, Callable[[Scores], Term | None]] = {
    "contrastive": contrastive_term,
    "local": local_term,
    "parts": parts_term,
    "reconstruction": reconstruction_term,
    "kl": kl_term,
    "in_batch_kl": in_batch_kl_term,
    "margin_mse": margin_mse_term,
    "binary": binary_term,
    "query_sparsity": partial(sparsity_term, "query"),
    "passage_sparsity": partial(sparsity_term, "passage"),
}
# Terms that depend on single texts; they are not repeated for smaller sizes of vectors.
TEXT_TERMS = ("reconstruction", "query_sparsity", "passage_sparsity")


@struct.dataclass
class LossTerms:
    """Loss of a batch and its terms: scalars, means over the queries that exist."""

    loss: Scalar  # the weighted sum
    terms: dict[str, Scalar]  # values of the terms that are on, without their weights
    accuracy: Any = None  # fraction of queries whose positive has the best score; None without a contrastive loss
    rank: Any = None  # mean rank of the positives, from 0; None without a contrastive loss
    # mean number of words of a query and of a passage; {} unless vectors are weights of words
    words: dict[str, Scalar] = struct.field(default_factory=dict)


def make_terms(scores: Scores) -> dict[str, Term]:
    """Return name -> term for the terms that are on. A term of a smaller size of vectors is called NAME_SIZE."""
    full_terms = {name: term for name, make_term in TERMS.items() if (term := make_term(scores)) is not None}
    weight_of = scores.settings.matryoshka.weight_of
    if not weight_of:
        return full_terms
    weight = scores.settings.matryoshka.whole_weight
    terms = {
        name: Term(term.weight * (1.0 if name in TEXT_TERMS else weight), term.value)
        for name, term in full_terms.items()
    }
    for size, similarities in scores.smaller.items():
        size_terms = make_terms(
            replace(
                scores,
                similarities=similarities,
                settings=replace(scores.settings, matryoshka=MatryoshkaSettings()),
                auxiliary_loss=None,
                sparsity=None,
                smaller={},
            )
        )
        terms |= {
            f"{name}_{size}": Term(term.weight * weight_of[size], term.value) for name, term in size_terms.items()
        }
    return terms


def total_loss(scores: Scores) -> LossTerms:
    """Return the weighted sum of all terms that are on, over all sizes of vectors. Accuracy and rank use vectors of
    full size."""
    terms = make_terms(scores)
    loss = sum((term.weight * term.value for term in terms.values()), jnp.zeros(()))
    rank = scores.rank()
    accuracy = scores.mean((rank == 0).astype(jnp.float32))
    words: dict[str, Scalar] = {}
    if scores.sparsity is not None:
        words = {"query_words": scores.sparsity.query_words, "passage_words": scores.sparsity.passage_words}
    values = {name: term.value for name, term in terms.items()}
    return LossTerms(loss, values, accuracy, scores.mean(rank), words)  # type: ignore[call-arg]
