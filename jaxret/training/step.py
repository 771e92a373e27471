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
from jaxret.training.grad_cache import count_chunks, encode_in_chunks
from jaxret.training.losses import LossSettings, LossTerms, Scores, candidates, loss_settings, total_loss
from jaxret.types import Batch, Embeddings, Tokens

Params = Any
Inputs = dict[Side, tuple[Tokens, Any]]  # each with its pseudo-queries, or None


@struct.dataclass
class TrainState:
    """Everything a run is. Once a loss or gradient is not finite, and may not be skipped, `healthy` is False and
    nothing changes any more: params and step stay those before the bad step, so that it can be looked into."""

    params: Params
    opt_state: optax.OptState
    step: jax.Array  # int32 [], updates made or skipped
    healthy: jax.Array  # bool []
    ema: Params | None = None  # the moving average of params, if there is one
    skipped: jax.Array | None = None  # int32 [], if updates may be skipped, or were

    @property
    def weights(self) -> Params:
        """What validation, encoding and search use."""
        return self.params if self.ema is None else self.ema


@dataclass(frozen=True)
class Rule:
    """How an update is made, beside the optimizer.

    accumulate: batches whose mean gradient it takes. ema: decay of the moving average of parameters, 0 for none; after
    every update it is ema * average + (1 - ema) * params. It begins with the first weights: those of a pre-trained
    encoder mean something, so there is no zero whose bias would have to be corrected (as timm's ModelEma, and torch's
    AveragedModel with get_ema_avg_fn). skip_nonfinite: how many updates of a run may be skipped for not being finite.
    """

    accumulate: int = 1
    ema: float = 0.0
    skip_nonfinite: int = 0


def make_rule(config: ConfigDict) -> Rule:
    return Rule(config.train.accumulate, config.optimizer.ema, config.train.skip_nonfinite)


def new_state(params: Params, optimizer: optax.GradientTransformation, rule: Rule) -> TrainState:
    """The state before the first update."""
    return TrainState(
        params,
        optimizer.init(params),
        jnp.int32(0),
        jnp.array(True),
        jax.tree.map(jnp.copy, params) if rule.ema else None,
        jnp.int32(0) if rule.skip_nonfinite else None,
    )


@dataclass(frozen=True)
class Objective:
    """The loss of a batch as a function of parameters."""

    retriever: Retriever
    settings: LossSettings
    mesh: Mesh
    chunk_size: int = 0  # queries encoded at a time, with their documents; 0: all
    reduce_dtype: Any = jnp.float32  # in which gradients are added up over devices
    from_copies: bool = False  # parameters are given as `copies` makes them

    def chunks(self, queries: int) -> int:
        """How many passes `queries` are encoded in."""
        return count_chunks(queries, self.chunk_size, self.mesh.size)

    def bins(self, queries: int) -> int:
        """How many parts of a batch are encoded on their own: the chunks of all devices."""
        return self.mesh.size * self.chunks(queries)

    def padding(self, batch: Batch) -> Any:
        """Tokens that the encoders compute for each real one."""
        texts, bins = (batch.queries, batch.documents), self.bins(batch.positives.shape[-1])
        return sum(tokens.computed(bins) for tokens in texts) / sum(jnp.sum(tokens.mask) for tokens in texts)

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
        read = self.reader(at_once=chunks > 1 or self.retriever.module.tied or self.from_copies)
        retriever = self.retriever.reading(read)

        def own(params: Params, inputs: Inputs, key: jax.Array) -> tuple[Embeddings, Embeddings]:
            params = jax.tree.map(lambda x: x[0], params) if self.from_copies else read.entry(params)
            device = jax.lax.axis_index(ROWS)

            def side(side: Side, key: jax.Array) -> Embeddings:
                def encode(tokens: Tokens, labels: jax.Array | None) -> Embeddings:
                    return retriever.encode(params, tokens, side, train, key, labels)

                tokens, labels = inputs[side]
                if tokens.rows is None:
                    count = len(tokens.ids)
                    tokens = replace(tokens, rows=device * count + jnp.arange(count))
                return encode_in_chunks(encode, (tokens, labels), chunks)

            query_key, document_key = jax.random.split(key)
            return side("query", query_key), side("passage", document_key)

        inputs: Inputs = {"query": (batch.queries, None), "passage": (batch.documents, batch.pseudo_queries)}
        places = P(ROWS) if self.from_copies else self.specs(params)
        mapped = jax.shard_map(own, mesh=self.mesh, in_specs=(places, P(ROWS), P()), out_specs=P(ROWS))
        q, d = mapped(params, inputs, key)
        return self.in_order(q, batch.queries), self.in_order(d, batch.documents)

    def in_order(self, embeddings: Embeddings, tokens: Tokens) -> Embeddings:
        """Texts that were dealt out to devices by length come back to their rows of the batch."""
        if tokens.rows is None:
            return embeddings
        everywhere = jax.lax.with_sharding_constraint(embeddings, replicated(self.mesh))
        place = jnp.argsort(tokens.rows)
        return jax.tree.map(lambda x: x[place], everywhere)

    def reader(self, at_once: bool) -> Reader:
        """at_once: whether layers are used several times, see Reader."""
        return Reader(self.retriever.module.compute.dtype, self.reduce_dtype, at_once, self.mesh.shape["fsdp"] > 1)

    def specs(self, params: Params) -> Any:
        """Where the parameters lie, for shard_map."""
        return jax.tree.map(lambda place: place.spec, shardings(self.mesh, params))

    def copies(self, params: Params) -> Params:
        """Every parameter whole, [devices, ...]: each device has its own copy, and their gradients are added up when
        this is differentiated. For an objective with `from_copies`, which can so be called several times while
        parameters and gradients travel once."""
        read = self.reader(at_once=True)

        def own(params: Params) -> Params:
            return jax.tree.map(lambda x: x[None], read.entry(params))

        return jax.shard_map(own, mesh=self.mesh, in_specs=(self.specs(params),), out_specs=P(ROWS))(params)

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


def loss_and_gradients(
    objective: Objective, params: Params, batch: Batch, dropout_key: jax.Array, step: jax.Array, count: int
) -> tuple[LossTerms, Params]:
    """The loss of an update and its gradients: means over `count` batches, stacked [count, ...] if they are several.

    Each batch has its own in-batch negatives, unlike the chunks of gradient caching, which share theirs. They are the
    batches step * count and on of the run: dropout's masks, and what changes with the epoch, are as if each were an
    update. The activations of one are held at a time.
    """

    def loss(params: Params, batch: Batch, number: jax.Array, objective: Objective) -> tuple[jax.Array, LossTerms]:
        terms = objective(params, batch, jax.random.fold_in(dropout_key, number), number)
        return terms.loss, terms

    gradient = jax.value_and_grad(loss, has_aux=True)
    if count == 1:
        (_, terms), gradients = gradient(params, batch, step, objective)
        return terms, gradients
    copies, add_up = jax.vjp(objective.copies, params)
    one = replace(objective, from_copies=True)

    def add(total: Params, inputs: tuple[Batch, jax.Array]) -> tuple[Params, LossTerms]:
        (_, terms), gradients = gradient(copies, *inputs, one)
        return jax.tree.map(jnp.add, total, gradients), terms

    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, copies), by_row(objective.mesh))
    total, terms = jax.lax.scan(add, zeros, (batch, step * count + jnp.arange(count)))
    (gradients,) = add_up(jax.tree.map(lambda x: x / count, total))
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), terms), gradients


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    dropout_key: jax.Array,
    rule: Rule = Rule(),
) -> Program:
    """(state, batch) -> (state, metrics), compiled once per batch shape; the old state's memory is reused.

    state: concrete or abstract, for its shardings. The batch is stacked [accumulate, ...] if the rule accumulates.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        found = loss_and_gradients(objective, state.params, batch, dropout_key, state.step, rule.accumulate)
        terms, gradients = found
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        finite = jnp.isfinite(terms.loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        params = optax.apply_updates(state.params, updates)
        ema = jax.tree.map(lambda e, w: e + (1 - rule.ema) * (w - e), state.ema, params) if rule.ema else None
        moved = replace(state, params=params, opt_state=opt_state, step=state.step + 1, ema=ema)
        new = jax.tree.map(
            lambda after, before: jnp.where(state.healthy & finite, after, before), moved, left_alone(state, rule)
        )
        metrics = {"loss": terms.loss, "in_batch_accuracy": terms.accuracy, "gradient_norm": norm}
        metrics["padding"] = objective.padding(batch)
        metrics |= {f"{name}_loss": value for name, value in terms.terms.items()}
        metrics["real_tokens"] = jnp.sum(batch.queries.mask) + jnp.sum(batch.documents.mask)
        return new, metrics

    mesh = objective.mesh
    state_shardings = shardings(mesh, state)
    return Program(
        train_step,
        in_shardings=(state_shardings, by_row(mesh, stacked=rule.accumulate > 1)),
        out_shardings=(state_shardings, replicated(mesh)),
        donate_argnums=0,
    )


def left_alone(state: TrainState, rule: Rule) -> TrainState:
    """The state after an update that is not made: skipped and counted, or, if that may not be, no longer healthy."""
    if state.skipped is None:
        return replace(state, healthy=jnp.array(False))
    skips = state.healthy & (state.skipped < rule.skip_nonfinite)
    return replace(state, step=state.step + skips, skipped=state.skipped + skips, healthy=skips)


def make_eval_step(objective: Objective, params: Params) -> Program:
    """(params, batch) -> LossTerms without dropout, compiled once per batch shape."""

    def eval_step(params: Params, batch: Batch) -> LossTerms:
        return objective(params, batch, jax.random.key(0), train=False)

    mesh = objective.mesh
    return Program(eval_step, in_shardings=(shardings(mesh, params), by_row(mesh)), out_shardings=replicated(mesh))
