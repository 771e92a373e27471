"""One training step: batch -> loss -> gradients -> new state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from ml_collections import ConfigDict

from jaxret.distributed import Program, by_row, replicated, shardings
from jaxret.models.model import Params
from jaxret.training.losses import LossTerms
from jaxret.training.objective import Objective

Batch = Any  # see Objective


@struct.dataclass
class TrainState:
    """Everything a run is. Once a loss or gradient is not finite, and may not be skipped, `healthy` is False and
    nothing changes any more: params and step stay those before the bad step, so that it can be looked into."""

    params: Any
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
        metrics = {"loss": terms.loss, "gradient_norm": norm}
        metrics |= {} if terms.accuracy is None else {"in_batch_accuracy": terms.accuracy}
        metrics["padding"] = objective.padding(batch)
        metrics |= {f"{name}_loss": value for name, value in terms.terms.items()}
        metrics["real_tokens"] = sum(jnp.sum(tokens.mask) for tokens in batch.texts)
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
