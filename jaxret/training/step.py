"""One training step: batch -> embeddings -> loss -> gradients -> new state. In-batch negatives span all devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jaxret.distributed import Program, by_row, replicated, shardings
from jaxret.models.heads.head import Side
from jaxret.models.retriever import Retriever
from jaxret.scoring import late_interaction, similarities
from jaxret.training.grad_cache import encode_in_chunks
from jaxret.training.losses import LossSettings, LossTerms, Scores, candidates, total_loss
from jaxret.types import Batch, Embeddings

Params = Any


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
        chunks = self.chunks(len(batch.positives))
        query_key, document_key = jax.random.split(key)

        def encode(side: Side) -> Callable[..., Embeddings]:
            return lambda inputs, k: self.retriever.encode(params, inputs[0], side, train, k, inputs[1])

        q = encode_in_chunks(encode("query"), (batch.queries, None), chunks, query_key)
        d = encode_in_chunks(encode("passage"), (batch.documents, batch.pseudo_queries), chunks, document_key)
        d = jax.lax.with_sharding_constraint(d, replicated(self.mesh))  # every device scores all documents
        epoch = self.settings.epoch(0 if step is None else step)
        annealing = self.settings.annealing(step) if step is not None else 1.0

        def scores(part: slice) -> jax.Array:
            return self.similarities(q, d, part)

        allowed = candidates(batch)
        return total_loss(
            Scores(scores, batch.positives, allowed, self.settings, annealing, epoch, d.own_loss, batch.teacher_scores)
        )

    def similarities(self, q: Embeddings, d: Embeddings, part: slice) -> jax.Array:
        """S [B,N,V] of a part of every vector, each device with its own queries; V = 1 under late interaction."""
        if self.retriever.late_interaction:
            scores = late_interaction(q.vectors, q.mask, d.vectors, d.mask)[..., None]
        else:
            scores = similarities(q.vectors[:, 0, part], d.vectors[..., part], d.mask)
        return jax.lax.with_sharding_constraint(scores, by_row(self.mesh))


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
