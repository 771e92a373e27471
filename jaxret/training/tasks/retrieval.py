"""Training a retriever: in-batch negatives over all devices, validation by retrieval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import BatchPlan, TrainingSet
from jaxret.models.heads import read_model_keys
from jaxret.models.heads.head import Side
from jaxret.models.retriever import COMPUTE_DTYPES, RetrieverModel, make_retriever_model
from jaxret.models.scoring import late_interaction, similarities
from jaxret.parallel.mesh import replicated_sharding, row_parts, row_sharding
from jaxret.runs.contract import make_contract
from jaxret.runs.run import load_tokenizer, make_embedder
from jaxret.runs.run_warnings import RunWarning
from jaxret.training.config_check import check_retrieval, weak_temperatures
from jaxret.training.config_sources import TRAINING_PASSAGES
from jaxret.training.examples import make_batch_plan
from jaxret.training.losses.grad_cache import encode_in_chunks
from jaxret.training.losses.group_losses import FalseNegativeSettings
from jaxret.training.losses.in_batch import (
    LossSettings,
    LossTerms,
    Scores,
    competing_passages,
    loss_settings,
    total_loss,
)
from jaxret.training.losses.matryoshka import cut_embeddings
from jaxret.training.losses.sparsity import Sparsity, mean_words, penalty
from jaxret.training.objective import Objective, number_rows
from jaxret.training.prepare import read_training_data
from jaxret.training.ranking import Ranker
from jaxret.training.step import make_eval_step
from jaxret.training.task import Task, TrainingData, TrainingJob
from jaxret.training.teacher import require_teacher, teacher_model
from jaxret.training.validation import RetrievalValidation, make_collection
from jaxret.types import Batch, Embeddings, HiddenStates, Params, Tokens

Inputs: TypeAlias = dict[Side, tuple[Tokens, Any]]  # each with its pseudo-queries, or None
RetrievalJob: TypeAlias = TrainingJob[RetrieverModel, TrainingSet, Batch]


@dataclass(frozen=True, kw_only=True)
class RetrievalObjective(Objective[RetrieverModel, Batch]):
    """The loss of a batch whose queries compete for all its passages, those of other devices too; or each for its own
    passages alone (loss.in_batch_negatives).
    """

    settings: LossSettings = field(default_factory=LossSettings)
    teacher: RetrievalObjective | None = None  # scores batches with `teacher_params`; None: there is none

    def __call__(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.Array | int | None = None, train: bool = True
    ) -> LossTerms:
        """Return the loss; without `train` passages are also pooled as at inference."""
        queries, passages = self.encode(params, batch, key, train)
        # Every device scores all passages.
        passages = jax.lax.with_sharding_constraint(passages, replicated_sharding(self.mesh))
        settings = self.settings
        if not train:  # masking is for training only
            settings = replace(settings, false_negatives=FalseNegativeSettings())
        return total_loss(
            Scores(
                similarities=self.similarities(queries, passages),
                positives=batch.positives,
                softmax_mask=competing_passages(batch, settings.in_batch_negatives),
                settings=settings,
                annealing=settings.annealing(step) if step is not None else 1.0,
                epoch=settings.epoch(0 if step is None else step),
                auxiliary_loss=passages.auxiliary_loss,
                teacher_scores=batch.teacher_scores,
                parts=tuple(self.similarities(queries, passages, slice(start, stop)) for start, stop in settings.parts),
                sparsity=self.sparsity(queries, passages, batch, step) if settings.count_words else None,
                passage_exists=batch.passage_ids >= 0,
                in_batch_teacher=self.teach(batch, key) if train else None,
                smaller={
                    size: self.similarities(cut_embeddings(queries, size), cut_embeddings(passages, size))
                    for size in settings.matryoshka.smaller_sizes
                },
            )
        )

    def teach(self, batch: Batch, key: jax.Array) -> jax.Array | None:
        """Return the teacher's scores [B,N], of vectors as at inference; None: there is no teacher."""
        if self.teacher is None or self.teacher_params is None:
            return None
        texts = replace(batch, pseudo_queries=None)  # the model's own head may learn from them
        queries, passages = self.teacher.encode(self.teacher_params, texts, key, train=False)
        passages = jax.lax.with_sharding_constraint(passages, replicated_sharding(self.mesh))
        return jax.lax.stop_gradient(jnp.max(self.teacher.similarities(queries, passages), axis=-1))

    def sparsity(
        self, queries: Embeddings, passages: Embeddings, batch: Batch, step: jax.Array | int | None
    ) -> Sparsity:
        """Return the penalties on the weights of words, over all texts of the batch.

        Args:
            queries, passages: their vectors.
            batch: whose empty rows count for nothing.
            step: number of the batch; None: the penalties' weights are whole.
        """
        settings = self.settings.sparsity
        query_weights = queries.vectors[:, 0], batch.positives >= 0
        passage_weights = passages.vectors[:, 0], batch.passage_ids >= 0
        return Sparsity(
            penalty(settings.query_norm, *query_weights),
            penalty(settings.passage_norm, *passage_weights),
            mean_words(*query_weights),
            mean_words(*passage_weights),
            settings.growth(step),
        )

    def encode(self, params: Params, batch: Batch, key: jax.Array, train: bool) -> tuple[Embeddings, Embeddings]:
        """Return the embeddings of queries and passages. Each device encodes its own rows: parameters are sent (see
        `ParameterGatherer`), texts are not.

        Args:
            batch: of all devices.
            key: of dropout.
            train: whether there is dropout, and pooling as in training.
        """
        chunks = self.chunks(batch.size)

        def encode_rows(
            retriever: RetrieverModel, params: Params, inputs: Inputs, key: jax.Array
        ) -> tuple[Embeddings, Embeddings]:
            def encode_side(side: Side, key: jax.Array) -> Embeddings:
                def encode(tokens: Tokens, labels: jax.Array | None) -> Embeddings:
                    return retriever.encode(params, tokens, side, train, key, labels)

                tokens, labels = inputs[side]
                return encode_in_chunks(encode, (number_rows(tokens), labels), chunks)

            query_key, passage_key = jax.random.split(key)
            return encode_side("query", query_key), encode_side("passage", passage_key)

        inputs: Inputs = {"query": (batch.queries, None), "passage": (batch.passages, batch.pseudo_queries)}
        repeated = chunks > 1 or self.model.module.tied
        queries, passages = self.on_devices(encode_rows, params, inputs, key, repeated)
        return self.in_order(queries, batch.queries), self.in_order(passages, batch.passages)

    def hidden_states(self, params: Params, batch: Batch) -> Iterator[tuple[str, HiddenStates]]:
        states = jax.jit(self.model.hidden_states, static_argnames="side")
        for side, tokens in (("query", batch.queries), ("passage", batch.passages)):
            yield f"{side} encoder", states(params, tokens, side=side)

    def in_order(self, embeddings: Embeddings, tokens: Tokens) -> Embeddings:
        """Return embeddings by row of the batch, of texts that were dealt out to devices by length."""
        if tokens.rows is None:
            return embeddings
        everywhere = jax.lax.with_sharding_constraint(embeddings, replicated_sharding(self.mesh))
        order = jnp.argsort(tokens.rows)
        return jax.tree.map(lambda x: x[order], everywhere)

    def similarities(self, queries: Embeddings, passages: Embeddings, part: slice = slice(None)) -> jax.Array:
        """Return S [B,N,V] of a part of every vector, each device with its own queries; V = 1 under late
        interaction."""
        if self.model.late_interaction:
            scores = late_interaction(queries.vectors, queries.mask, passages.vectors, passages.mask)[..., None]
        else:
            scores = similarities(queries.vectors[:, 0, part], passages.vectors[..., part], passages.mask)
        return jax.lax.with_sharding_constraint(scores, row_sharding(self.mesh))


def make_retrieval_objective(
    config: ConfigDict, retriever: RetrieverModel, mesh: Mesh, epochs_per_step: float = 0.0
) -> RetrievalObjective:
    """Return the loss of a config. Raises ValueError if train.teacher cannot teach it.

    Args:
        epochs_per_step: batch size / number of examples.
    """
    teacher = teacher_model(config, retriever)
    objective = RetrievalObjective(
        model=retriever,
        mesh=mesh,
        chunk_size=config.train.chunk_size,
        reduce_dtype=COMPUTE_DTYPES[config.mesh.reduce_dtype],
        settings=loss_settings(config, retriever, epochs_per_step),
    )
    return objective if teacher is None else replace(objective, teacher=replace(objective, model=teacher))


def make_retrieval_plan(config: ConfigDict, retriever: RetrieverModel, batch_size: int, devices: int) -> BatchPlan:
    """Return how examples become batches, padded.

    Args:
        retriever: whose head may read pseudo-queries.
        devices: that share a batch.
    """
    return make_batch_plan(config, batch_size, devices, retriever.module.head.pseudo_query_length())


def pack_plan(plan: BatchPlan, data: TrainingSet, retriever: RetrieverModel, bins: int) -> BatchPlan:
    """Return the plan of the same batches, packed.

    Args:
        plan: of the padded batches.
        data: examples, for their lengths.
        retriever: whose head may put prefix tokens before a text.
        bins: chunks of all devices; each is packed alone.
    """
    head = retriever.module.head
    return plan.with_packer(data, bins, (head.prefix_length("query"), head.prefix_length("passage")), head.hidden_size)


def make_validation(
    config: ConfigDict,
    objective: Objective[RetrieverModel, Batch],
    params: Params,
    data: TrainingData[TrainingSet],
    progress: bool = False,
) -> RetrievalValidation:
    """Return the validation on the dev set, and on the corpus, a pool or all training passages.

    Args:
        params: concrete or abstract, for their shardings.
        data: of the run, with a dev set.
    """
    assert data.dev is not None
    embedder = make_embedder(objective.model.uncut, params, objective.mesh, data.tokenizer, config)
    pool_size = None if config.validation.corpus == TRAINING_PASSAGES else config.validation.pool_size
    collection = data.corpus or make_collection(data.dev, data.train, pool_size, config.seed.data)
    plan = make_retrieval_plan(config, objective.model, config.validation.batch_size, row_parts(objective.mesh))
    ranker = Ranker(embedder, collection.depth)
    return RetrievalValidation(data.dev, collection, plan, make_eval_step(objective, params), ranker, progress)


def _read_data(job: RetrievalJob) -> TrainingData[TrainingSet]:
    if job.config.train.teacher:  # before any text is tokenized
        contract = make_contract(job.model, load_tokenizer(job.config, job.encoder, job.model), job.encoder)
        require_teacher(job.config, job.model, contract)
    data, warning = read_training_data(job), weak_temperatures(job.config, job.model)
    return replace(data, warnings=(RunWarning("settings", warning),)) if warning else data


def _make_validator(
    job: RetrievalJob, data: TrainingData[TrainingSet], objective: Objective[RetrieverModel, Batch], params: Params
) -> RetrievalValidation | None:
    return make_validation(job.config, objective, params, data, job.progress) if data.dev else None


def _make_plan(
    job: RetrievalJob, data: TrainingData[TrainingSet], objective: Objective[RetrieverModel, Batch]
) -> BatchPlan:
    for warning in data.warnings:
        job.log(warning.text)
    plan = make_retrieval_plan(job.config, job.model, job.config.train.batch_size, row_parts(job.mesh))
    if data.train and job.config.tokens.packing:
        return pack_plan(plan, data.train, job.model, objective.bins(plan.padded_size))
    return plan


RETRIEVAL: Task[RetrieverModel, TrainingSet, Batch] = Task(
    name="retrieval",
    encoder_settings=read_model_keys,
    build=make_retriever_model,
    check=check_retrieval,
    read_data=_read_data,
    make_objective=make_retrieval_objective,
    make_plan=_make_plan,
    make_validator=_make_validator,
)
