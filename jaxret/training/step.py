"""One training step: batch -> loss -> gradients -> new state."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxret.models.model import ModelT
from jaxret.models.partition import join_parameters
from jaxret.parallel.mesh import Program, replicated_sharding, row_sharding, shardings
from jaxret.training.losses.in_batch import LossTerms
from jaxret.training.objective import Objective
from jaxret.training.train_state import PLAIN_RULE, TrainState, UpdateRule
from jaxret.types import BatchT, Params


def loss_and_gradients(
    objective: Objective[ModelT, BatchT],
    params: Params,
    batch: BatchT,
    dropout_key: jax.Array,
    step: jax.Array,
    count: int,
    frozen_params: Params | None = None,
) -> tuple[LossTerms, Params]:
    """Return the loss of an update and its gradients, which are means over `count` batches.

    Each batch has its own in-batch negatives, while the chunks of gradient caching share them. Dropout masks, and terms
    that change with the epoch, depend on the number of the batch in the run, step * count + i. Memory holds the
    activations of one batch.

    Args:
        objective: the loss.
        params: parameters that are trained.
        batch: one batch, or several, stacked [count, ...].
        dropout_key: the key of the run's dropout.
        step: number of the update, from 0.
        count: number of batches of an update.
        frozen_params: the other parameters of the model; None: all are trained.
    """

    def loss(
        params: Params, frozen_params: Params, batch: BatchT, number: jax.Array, objective: Objective[ModelT, BatchT]
    ) -> tuple[jax.Array, LossTerms]:
        terms = objective(
            join_parameters(params, frozen_params), batch, jax.random.fold_in(dropout_key, number), number
        )
        return terms.loss, terms

    gradient = jax.value_and_grad(loss, has_aux=True)
    if count == 1:
        (_, terms), gradients = gradient(params, frozen_params or {}, batch, step, objective)
        return terms, gradients
    copies, add_up = jax.vjp(objective.copies, params)
    frozen_copies = objective.copies(frozen_params) if frozen_params else {}
    on_copies = replace(objective, from_copies=True)

    def add(total: Params, inputs: tuple[BatchT, jax.Array]) -> tuple[Params, LossTerms]:
        (_, terms), gradients = gradient(copies, frozen_copies, *inputs, on_copies)
        return jax.tree.map(jnp.add, total, gradients), terms

    places = jax.tree.map(lambda spec: NamedSharding(objective.mesh, spec), objective.copies_specs(params))
    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, copies), places)
    total, terms = jax.lax.scan(add, zeros, (batch, step * count + jnp.arange(count)))
    (gradients,) = add_up(jax.tree.map(lambda x: x / count, total))
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), terms), gradients


def make_train_step(
    objective: Objective[ModelT, BatchT],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    dropout_key: jax.Array,
    rule: UpdateRule = PLAIN_RULE,
) -> Program:
    """Return the program (state, batch) -> (state, metrics), compiled once per batch shape. It reuses the memory of its
    argument `state`.

    Args:
        objective: the loss.
        optimizer: gradients -> updates.
        state: concrete or abstract state, for its shardings.
        dropout_key: the key of the run's dropout.
        rule: how an update is made; if it accumulates, batches are stacked [accumulate, ...].
    """

    def train_step(state: TrainState, batch: BatchT) -> tuple[TrainState, dict[str, jax.Array]]:
        full_objective = objective.with_teacher(state.teacher)
        arguments = state.params, batch, dropout_key, state.step, rule.accumulate, state.frozen
        terms, gradients = loss_and_gradients(full_objective, *arguments)
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        finite = jnp.isfinite(terms.loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        params = optax.apply_updates(state.params, updates)
        ema = jax.tree.map(lambda e, w: e + (1 - rule.ema) * (w - e), state.ema, params) if rule.ema else None
        next_state = replace(state, params=params, opt_state=opt_state, step=state.step + 1, ema=ema)
        new = jax.tree.map(
            lambda next_leaf, old_leaf: jnp.where(state.healthy & finite, next_leaf, old_leaf),
            next_state,
            unchanged_state(state, rule),
        )
        metrics = {"loss": terms.loss, "gradient_norm": norm}
        metrics |= {} if terms.accuracy is None else {"in_batch_accuracy": terms.accuracy}
        metrics["padding"] = objective.padding(batch)
        metrics |= {f"{name}_loss": value for name, value in terms.terms.items()}
        metrics |= terms.words
        metrics["real_tokens"] = sum(jnp.sum(tokens.mask) for tokens in batch.texts)
        return new, metrics

    mesh = objective.mesh
    state_shardings = shardings(mesh, state)
    return Program(
        train_step,
        in_shardings=(state_shardings, row_sharding(mesh, stacked=rule.accumulate > 1)),
        out_shardings=(state_shardings, replicated_sharding(mesh)),
        donate_argnums=0,
    )


def unchanged_state(state: TrainState, rule: UpdateRule) -> TrainState:
    """Return the state after an update that was not finite. The update is counted as skipped or, if no more may be
    skipped, the state is marked as not healthy."""
    if state.skip_count is None:
        return replace(state, healthy=jnp.array(False))
    skips = state.healthy & (state.skip_count < rule.skip_nonfinite)
    return replace(state, step=state.step + skips, skip_count=state.skip_count + skips, healthy=skips)


def make_eval_step(objective: Objective[ModelT, BatchT], params: Params) -> Program:
    """Return the program (params, batch) -> LossTerms without dropout, compiled once per batch shape."""

    def eval_step(params: Params, batch: BatchT) -> LossTerms:
        return objective(params, batch, jax.random.key(0), train=False)

    mesh = objective.mesh
    return Program(
        eval_step, in_shardings=(shardings(mesh, params), row_sharding(mesh)), out_shardings=replicated_sharding(mesh)
    )
