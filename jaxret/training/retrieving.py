"""Training a retriever: in-batch negatives over all devices, validation by retrieval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.data.tokenizer import TextTokenizer
from jaxret.distributed import by_row, replicated
from jaxret.models.encoders.pretrained import Params
from jaxret.models.heads import stated
from jaxret.models.heads.head import Side
from jaxret.models.retriever import DTYPES, BiEncoder, build_retriever
from jaxret.runs.run import make_embedder
from jaxret.scoring import late_interaction, similarities
from jaxret.training.begin import Job, Texts, read_texts
from jaxret.training.check import check_model, weak_temperatures
from jaxret.training.examples import TRAINING_PASSAGES, plan_of
from jaxret.training.grad_cache import encode_in_chunks
from jaxret.training.losses import LossTerms, Scores, candidates, loss_settings, total_loss
from jaxret.training.objective import Objective, numbered
from jaxret.training.ranking import Ranker
from jaxret.training.step import make_eval_step
from jaxret.training.task import Task
from jaxret.training.validation import Collection, Validation, make_collection
from jaxret.types import Batch, Embeddings, HiddenStates, Tokens

Inputs = dict[Side, tuple[Tokens, Any]]  # each with its pseudo-queries, or None


@dataclass(frozen=True)
class RetrievalObjective(Objective):
    """The loss of a batch whose queries compete for all its documents, those of other devices too."""

    @property
    def retriever(self) -> BiEncoder:
        assert isinstance(self.model, BiEncoder)
        return self.model

    def __call__(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.Array | int | None = None, train: bool = True
    ) -> LossTerms:
        """`step` is for what changes with the epoch. Without `train` there is no dropout and no annealing, and
        documents are pooled as at inference."""
        q, d = self.encode(params, batch, key, train)
        d = jax.lax.with_sharding_constraint(d, replicated(self.mesh))  # every device scores all documents
        epoch = self.settings.epoch(0 if step is None else step)
        annealing = self.settings.annealing(step) if step is not None else 1.0

        def scores(part: slice) -> jax.Array:
            return self.similarities(q, d, part)

        allowed = candidates(batch)
        return total_loss(
            Scores(scores, batch.positives, allowed, self.settings, annealing, epoch, d.own_loss, batch.teacher_scores)
        )

    def encode(self, params: Params, batch: Batch, key: jax.Array, train: bool) -> tuple[Embeddings, Embeddings]:
        """Queries and documents, each device its own rows, and all parameters as `Reader` says: no text travels."""
        chunks = self.chunks(batch.size)

        def own(retriever: BiEncoder, params: Params, inputs: Inputs, key: jax.Array) -> tuple[Embeddings, Embeddings]:
            def side(side: Side, key: jax.Array) -> Embeddings:
                def encode(tokens: Tokens, labels: jax.Array | None) -> Embeddings:
                    return retriever.encode(params, tokens, side, train, key, labels)

                tokens, labels = inputs[side]
                return encode_in_chunks(encode, (numbered(tokens), labels), chunks)

            query_key, document_key = jax.random.split(key)
            return side("query", query_key), side("passage", document_key)

        inputs: Inputs = {"query": (batch.queries, None), "passage": (batch.documents, batch.pseudo_queries)}
        q, d = self.on_devices(own, params, inputs, key, often=chunks > 1 or self.retriever.module.tied)
        return self.in_order(q, batch.queries), self.in_order(d, batch.documents)

    def hidden_states(self, params: Params, batch: Batch) -> Iterator[tuple[str, HiddenStates]]:
        found = jax.jit(self.retriever.hidden_states, static_argnames="side")
        for side, tokens in (("query", batch.queries), ("passage", batch.documents)):
            yield f"{side} encoder", found(params, tokens, side=side)

    def in_order(self, embeddings: Embeddings, tokens: Tokens) -> Embeddings:
        """Texts that were dealt out to devices by length come back to their rows of the batch."""
        if tokens.rows is None:
            return embeddings
        everywhere = jax.lax.with_sharding_constraint(embeddings, replicated(self.mesh))
        place = jnp.argsort(tokens.rows)
        return jax.tree.map(lambda x: x[place], everywhere)

    def similarities(self, q: Embeddings, d: Embeddings, part: slice) -> jax.Array:
        """S [B,N,V] of a part of every vector, each device with its own queries; V = 1 under late interaction."""
        if self.retriever.late_interaction:
            scores = late_interaction(q.vectors, q.mask, d.vectors, d.mask)[..., None]
        else:
            scores = similarities(q.vectors[:, 0, part], d.vectors[..., part], d.mask)
        return jax.lax.with_sharding_constraint(scores, by_row(self.mesh))


def make_objective(
    config: ConfigDict, retriever: BiEncoder, mesh: Mesh, epochs_per_step: float = 0.0
) -> RetrievalObjective:
    """The loss that a config describes."""
    settings = loss_settings(config, retriever, epochs_per_step)
    return RetrievalObjective(retriever, settings, mesh, config.train.chunk_size, DTYPES[config.mesh.reduce_dtype])


def batch_plan(config: ConfigDict, retriever: BiEncoder, batch_size: int, devices: int) -> BatchPlan:
    return plan_of(config, batch_size, devices, retriever.module.head.pseudo_query_length())


def packed(plan: BatchPlan, data: TrainingSet, retriever: BiEncoder, bins: int) -> BatchPlan:
    """The same batches, packed for so many chunks of devices."""
    head = retriever.module.head
    return plan.packed(data, bins, (head.slots("query"), head.slots("passage")), head.hidden_size)


def make_validation(
    config: ConfigDict,
    objective: RetrievalObjective,
    params: Params,
    dev: TrainingSet,
    data: TrainingSet | None,
    tokenizer: TextTokenizer,
    corpus: Collection | None = None,
    progress: bool = False,
) -> Validation:
    """corpus: what to retrieve from, instead of a pool or all training passages."""
    embedder = make_embedder(objective.retriever, params, objective.mesh, tokenizer, config)
    pool_size = None if config.validation.corpus == TRAINING_PASSAGES else config.validation.pool_size
    collection = corpus or make_collection(dev, data, pool_size, config.seed.data)
    plan = batch_plan(config, objective.retriever, config.validation.batch_size, objective.mesh.size)
    ranker = Ranker(embedder, collection.depth)
    return Validation(dev, collection, plan, make_eval_step(objective, params), ranker, progress)


def _plan(job: Job, texts: Texts, objective: RetrievalObjective) -> BatchPlan:
    if told := weak_temperatures(job.config, objective.retriever):
        job.say(told)
    plan = batch_plan(job.config, objective.retriever, job.config.train.batch_size, job.mesh.size)
    if texts.train and job.config.tokens.packing:
        return packed(plan, texts.train, objective.retriever, objective.bins(plan.places))
    return plan


def _validate(job: Job, texts: Texts, objective: RetrievalObjective, params: Params) -> Validation | None:
    if not texts.dev:
        return None
    return make_validation(
        job.config, objective, params, texts.dev, texts.train, texts.tokenizer, texts.corpus, job.progress
    )


RETRIEVAL = Task("retrieval", stated, build_retriever, check_model, read_texts, make_objective, _plan, _validate)
