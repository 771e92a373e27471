"""Find the first parameter, hidden layer, loss term or gradient that is not finite, in the order of computation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxret.models.model import ModelT
from jaxret.parallel.mesh import path_name
from jaxret.training.objective import Objective
from jaxret.types import BatchT, Params

# The diagnosis if no other value is broken.
SOUND = "every hidden state, the loss and its gradient are finite, so the optimizer's update is not"


class NotFiniteError(ArithmeticError):
    """A parameter, a vector, the loss, a gradient or a metric is NaN or infinite."""


@jax.jit
def _finite(tree: Any) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]


def not_finite(tree: Any) -> list[str]:
    """Return the paths of the leaves that contain a NaN or an infinity."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [path_name(path) for (path, _), finite in zip(leaves, _finite(tree)) if not bool(finite)]


def diagnose(
    objective: Objective[ModelT, BatchT],
    params: Params,
    batch: BatchT,
    key: jax.Array,
    batch_number: jax.Array | int = 0,
) -> str:
    """Return a sentence that names the first value of a batch that is not finite, or SOUND.

    Args:
        objective: the objective whose loss is computed.
        params: the parameters before the update.
        batch: the batch, on the mesh.
        key: the key of dropout.
        batch_number: number of the batch in the run.
    """
    if bad := not_finite(params):
        return f"parameter {bad[0]} ({len(bad)} in all) is not finite"
    for encoder, hidden in objective.hidden_states(params, batch):
        for layer, state in enumerate(hidden.states):
            if not bool(jnp.all(jnp.isfinite(state))):
                layer_name = "the embedding layer" if layer == 0 else f"layer {layer}"
                return f"{layer_name} of the {encoder} is not finite"

    def loss(params: Any, batch: Any, key: jax.Array, batch_number: Any, teacher: Any) -> Any:
        terms = objective.with_teacher(teacher)(params, batch, key, batch_number)
        return terms.loss, terms

    # The arrays are arguments, because XLA would fold constants for minutes.
    arguments = params, batch, key, batch_number, objective.teacher_params
    (_, terms), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments)
    if bad := not_finite(terms):
        return f"loss term {bad[0]} is not finite, though every hidden state is"
    if bad := not_finite(gradients):
        return f"the gradient of {bad[0]} ({len(bad)} in all) is not finite, though the loss is"
    return SOUND
