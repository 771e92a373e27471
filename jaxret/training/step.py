"""One training step: batch -> embeddings -> loss -> gradients -> new state. In-batch negatives span all devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jaxret.distributed import ROWS, Program, Reader, by_row, replicated, shardings
from jaxret.models.heads.head import Side
from jaxret.models.retriever import DTYPES, Retriever
from jaxret.scoring import late_interaction, similarities
from jaxret.training.grad_cache import encode_in_chunks
from jaxret.training.losses import LossSettings, LossTerms, Scores, candidates, loss_settings, total_loss
from jaxret.types import Batch, Embeddings, Tokens

Params = Any
Inputs = dict[Side, tuple[Tokens, Any]]  # each with its pseudo-queries, or None


@struct.dataclass
class TrainState:
    """Everything a run is. Once a loss or gradient is not finite, `healthy` is False and nothing changes any more:
    params and step stay those before the bad step, so that it can be looked into."""

    params: Params
    opt_state: optax.OptState
    step: jax.Array  # int32 [], updates made
    healthy: jax.Array  # bool []


@dataclass(frozen=True)
class Objective:
    """The loss of a batch as a function of parameters."""

    retriever: Retriever
    settings: LossSettings
    mesh: Mesh
    chunk_size: int = 0  # queries encoded at a time, with their documents; 0: all
    reduce_dtype: Any = jnp.float32  # in which gradients are added up over devices

    def chunks(self, queries: int) -> int:
        """How many passes `queries` are encoded in: of `chunk_size` queries, or a little more, so that every pass is as
        long as the others and every device has part of each. One query on each of 8 devices is 8 at a time."""
        wanted = min(self.chunk_size or queries, queries)
        fitting = (n for n in range(wanted, queries) if queries % n == 0 and n % self.mesh.size == 0)
        return queries // next(fitting, queries)

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
        chunks = self.chunks(len(batch.positives))
        module = self.retriever.module
        read = Reader(
            module.compute.dtype,
            self.reduce_dtype,
            at_once=chunks > 1 or module.tied,
            split=self.mesh.shape["fsdp"] > 1,
        )
        retriever = self.retriever.reading(read)

        def own(params: Params, inputs: Inputs, key: jax.Array) -> tuple[Embeddings, Embeddings]:
            params, device = read.entry(params), jax.lax.axis_index(ROWS)

            def side(side: Side, key: jax.Array) -> Embeddings:
                def encode(tokens: Tokens, labels: jax.Array | None) -> Embeddings:
                    return retriever.encode(params, tokens, side, train, key, labels)

                tokens, labels = inputs[side]
                count = len(tokens.ids)
                tokens = replace(tokens, rows=device * count + jnp.arange(count))
                return encode_in_chunks(encode, (tokens, labels), chunks)

            query_key, document_key = jax.random.split(key)
            return side("query", query_key), side("passage", document_key)

        inputs: Inputs = {"query": (batch.queries, None), "passage": (batch.documents, batch.pseudo_queries)}
        places = jax.tree.map(lambda place: place.spec, shardings(self.mesh, params))
        mapped = jax.shard_map(own, mesh=self.mesh, in_specs=(places, P(ROWS), P()), out_specs=P(ROWS))
        return mapped(params, inputs, key)

    def similarities(self, q: Embeddings, d: Embeddings, part: slice) -> jax.Array:
        """S [B,N,V] of a part of every vector, each device with its own queries; V = 1 under late interaction."""
        if self.retriever.late_interaction:
            scores = late_interaction(q.vectors, q.mask, d.vectors, d.mask)[..., None]
        else:
            scores = similarities(q.vectors[:, 0, part], d.vectors[..., part], d.mask)
        return jax.lax.with_sharding_constraint(scores, by_row(self.mesh))


def make_objective(config: ConfigDict, retriever: Retriever, mesh: Mesh, epochs_per_step: float = 0.0) -> Objective:
    """The loss that a config describes."""
    settings = loss_settings(config, retriever, epochs_per_step)
    return Objective(retriever, settings, mesh, config.train.chunk_size, DTYPES[config.mesh.reduce_dtype])


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, state: TrainState, dropout_key: jax.Array
) -> Program:
    """(state, batch) -> (state, metrics), compiled once per batch shape; the old state's memory is reused.

    state: concrete or abstract, for its shardings.
    """

    def loss(params: Params, batch: Batch, key: jax.Array, step: jax.Array) -> tuple[jax.Array, LossTerms]:
        terms = objective(params, batch, key, step)
        return terms.loss, terms

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(dropout_key, state.step)
        (_, terms), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, batch, key, state.step)
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        finite = jnp.isfinite(terms.loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        healthy = state.healthy & finite
        moved = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1, healthy)
        kept = TrainState(state.params, state.opt_state, state.step, healthy)
        new = jax.tree.map(lambda after, before: jnp.where(healthy, after, before), moved, kept)
        metrics = {"loss": terms.loss, "in_batch_accuracy": terms.accuracy, "gradient_norm": norm}
        metrics |= {f"{name}_loss": value for name, value in terms.terms.items()}
        return new, metrics

    mesh = objective.mesh
    state_shardings = shardings(mesh, state)
    return Program(
        train_step,
        in_shardings=(state_shardings, by_row(mesh)),
        out_shardings=(state_shardings, replicated(mesh)),
        donate_argnums=0,
    )


def make_eval_step(objective: Objective, params: Params) -> Program:
    """(params, batch) -> LossTerms without dropout, compiled once per batch shape."""

    def eval_step(params: Params, batch: Batch) -> LossTerms:
        return objective(params, batch, jax.random.key(0), train=False)

    mesh = objective.mesh
    return Program(eval_step, in_shardings=(shardings(mesh, params), by_row(mesh)), out_shardings=replicated(mesh))
