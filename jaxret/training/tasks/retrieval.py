"""Train a retriever with in-batch negatives over all devices, and validate it by retrieval."""

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
from jaxret.models.retriever_model import COMPUTE_DTYPES, RetrieverModel, make_retriever_model
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

Inputs: TypeAlias = dict[Side, tuple[Tokens, Any]]  # side -> (texts, their pseudo-queries or None)
RetrievalJob: TypeAlias = TrainingJob[RetrieverModel, TrainingSet, Batch]


@dataclass(frozen=True, kw_only=True)
class RetrievalObjective(Objective[RetrieverModel, Batch]):
    """The loss of a batch in which each query is compared with the passages of all devices or, without
    loss.in_batch_negatives, only with its own passages."""

    settings: LossSettings = field(default_factory=LossSettings)
    teacher: RetrievalObjective | None = None  # objective of the teacher, which scores batches with `teacher_params`

    def __call__(
        self,
        params: Params,
        batch: Batch,
        key: jax.Array,
        batch_number: jax.Array | int | None = None,
        train: bool = True,
    ) -> LossTerms:
        """Return the loss and its terms. Without `train`, there is no dropout, and passages are pooled as at
        inference."""
        queries, passages = self.encode(params, batch, key, train)
        # Every device scores its queries with all passages.
        passages = jax.lax.with_sharding_constraint(passages, replicated_sharding(self.mesh))
        settings = self.settings
        if not train:  # false negatives are masked only in training
            settings = replace(settings, false_negatives=FalseNegativeSettings())
        return total_loss(
            Scores(
                similarities=self.similarities(queries, passages),
                positives=batch.positives,
                softmax_mask=competing_passages(batch, settings.in_batch_negatives),
                settings=settings,
                annealing=settings.annealing(batch_number) if batch_number is not None else 1.0,
                epoch=settings.epoch(0 if batch_number is None else batch_number),
                auxiliary_loss=passages.auxiliary_loss,
                teacher_scores=batch.teacher_scores,
                parts=tuple(self.similarities(queries, passages, slice(start, stop)) for start, stop in settings.parts),
                sparsity=self.sparsity(queries, passages, batch, batch_number) if settings.count_words else None,
                passage_exists=batch.passage_ids >= 0,
                in_batch_teacher=self.teach(batch, key) if train else None,
                smaller={
                    size: self.similarities(cut_embeddings(queries, size), cut_embeddings(passages, size))
                    for size in settings.matryoshka.smaller_sizes
                },
            )
        )

    def teach(self, batch: Batch, key: jax.Array) -> jax.Array | None:
        """Return the teacher's scores [B,N] without dropout and with the pooling of inference; None without a
        teacher."""
        if self.teacher is None or self.teacher_params is None:
            return None
        texts = replace(batch, pseudo_queries=None)  # only the student's head learns from pseudo-queries
        queries, passages = self.teacher.encode(self.teacher_params, texts, key, train=False)
        passages = jax.lax.with_sharding_constraint(passages, replicated_sharding(self.mesh))
        return jnp.max(self.teacher.similarities(queries, passages), axis=-1)

    def sparsity(
        self, queries: Embeddings, passages: Embeddings, batch: Batch, batch_number: jax.Array | int | None
    ) -> Sparsity:
        """Return the penalties on the weights of words, over all texts of the batch.

        Args:
            queries: vectors of the queries.
            passages: vectors of the passages.
            batch: the batch, whose empty rows are ignored.
            batch_number: number of the batch in the run; None: the penalties have their full weights.
        """
        settings = self.settings.sparsity
        query_weights = queries.vectors[:, 0], batch.positives >= 0
        passage_weights = passages.vectors[:, 0], batch.passage_ids >= 0
        return Sparsity(
            penalty(settings.query_norm, *query_weights),
            penalty(settings.passage_norm, *passage_weights),
            mean_words(*query_weights),
            mean_words(*passage_weights),
            settings.growth(batch_number),
        )

    def encode(self, params: Params, batch: Batch, key: jax.Array, train: bool) -> tuple[Embeddings, Embeddings]:
        """Return the embeddings of queries and passages. Each device encodes its own rows. Parameters are sent between
        devices (see `ParameterGatherer`), texts are not.

        Args:
            params: parameters of the model.
            batch: the batch of all devices.
            key: the key of dropout.
            train: whether there is dropout, and the pooling of training.
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
        """Return embeddings in the order of the batch. Texts may have been distributed over devices by length."""
        if tokens.rows is None:
            return embeddings
        all_embeddings = jax.lax.with_sharding_constraint(embeddings, replicated_sharding(self.mesh))
        order = jnp.argsort(tokens.rows)
        return jax.tree.map(lambda x: x[order], all_embeddings)

    def similarities(self, queries: Embeddings, passages: Embeddings, part: slice = slice(None)) -> jax.Array:
        """Return S [B,N,V] computed from a part of every vector; V = 1 under late interaction. Each device has the rows
        of its queries."""
        if self.model.late_interaction:
            scores = late_interaction(queries.vectors, queries.mask, passages.vectors, passages.mask)[..., None]
        else:
            scores = similarities(queries.vectors[:, 0, part], passages.vectors[..., part], passages.mask)
        return jax.lax.with_sharding_constraint(scores, row_sharding(self.mesh))


def make_retrieval_objective(
    config: ConfigDict, retriever: RetrieverModel, mesh: Mesh, epochs_per_batch: float = 0.0
) -> RetrievalObjective:
    """Return the objective of a config. Raises ValueError if train.teacher cannot teach the model.

    Args:
        config: the config of the run.
        retriever: the model.
        mesh: the devices.
        epochs_per_batch: batch size / number of examples.
    """
    teacher = teacher_model(config, retriever)
    objective = RetrievalObjective(
        model=retriever,
        mesh=mesh,
        chunk_size=config.train.chunk_size,
        reduce_dtype=COMPUTE_DTYPES[config.mesh.reduce_dtype],
        settings=loss_settings(config, retriever, epochs_per_batch),
    )
    return objective if teacher is None else replace(objective, teacher=replace(objective, model=teacher))


def make_retrieval_plan(config: ConfigDict, retriever: RetrieverModel, batch_size: int, devices: int) -> BatchPlan:
    """Return the plan of padded batches.

    Args:
        config: the config of the run.
        retriever: the model, whose head may read pseudo-queries.
        batch_size: examples of a batch.
        devices: number of devices that share a batch.
    """
    return make_batch_plan(config, batch_size, devices, retriever.module.head.pseudo_query_length())


def pack_plan(plan: BatchPlan, data: TrainingSet, retriever: RetrieverModel, bins: int) -> BatchPlan:
    """Return a plan of the same batches in packed rows.

    Args:
        plan: the plan of padded batches.
        data: the examples, for their lengths.
        retriever: the model, whose head may put prefix tokens before a text.
        bins: number of chunks of all devices; each chunk is packed separately.
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
    """Return the validation by the dev set, with retrieval from the corpus, a pool or all training passages.

    Args:
        config: the config of the run.
        objective: the objective of training.
        params: concrete or abstract parameters, for their shardings.
        data: the data of the run, with a dev set.
        progress: whether progress is printed.
    """
    assert data.dev is not None
    embedder = make_embedder(objective.model.uncut, params, objective.mesh, data.tokenizer, config)
    pool_size = None if config.validation.corpus == TRAINING_PASSAGES else config.validation.pool_size
    collection = data.corpus or make_collection(data.dev, data.train, pool_size, config.seed.data)
    plan = make_retrieval_plan(config, objective.model, config.validation.batch_size, row_parts(objective.mesh))
    ranker = Ranker(embedder, collection.depth)
    return RetrievalValidation(data.dev, collection, plan, make_eval_step(objective, params), ranker, progress)


def _read_retrieval_data(job: RetrievalJob) -> TrainingData[TrainingSet]:
    if job.config.train.teacher:  # a wrong teacher is an error before texts are tokenized
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
    read_data=_read_retrieval_data,
    make_objective=make_retrieval_objective,
    make_plan=_make_plan,
    make_validator=_make_validator,
)
