"""The state of a run (parameters, optimizer, counters), and functions that place, save and restore it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.models.lora import BASE, cast_base
from jaxret.models.model import Model
from jaxret.models.partition import divide_parameters, frozen_pattern, join_parameters
from jaxret.parallel.mesh import place_tree, replicated_sharding, sharded_shapes, shardings
from jaxret.storage.checkpoint import Checkpoints
from jaxret.types import Params


@struct.dataclass
class TrainState:
    """The values that a training step changes, and the parameters that it only reads: frozen ones, and a teacher's.

    If a loss or gradient is not finite and may not be skipped, `healthy` becomes False and no later step changes the
    state. It stays as it was before the failed step, so that this step can be examined.
    """

    params: Any  # parameters that are trained
    opt_state: optax.OptState  # state of the optimizer
    step: jax.Array  # int32 [], number of updates, skipped ones included
    healthy: jax.Array  # bool [], False after a failed step
    ema: Params | None = None  # the moving average of params; None: no average is kept
    skip_count: jax.Array | None = None  # int32 [], number of skipped updates; None: no update may be or was skipped
    teacher: Params | None = None  # parameters of a teacher, which checkpoints do not contain; None: no teacher
    frozen: Params = struct.field(default_factory=dict)  # parameters that are not trained

    @property
    def weights(self) -> Params:
        """All parameters, for validation, encoding and search."""
        return join_parameters(self.params if self.ema is None else self.ema, self.frozen)


@dataclass(frozen=True)
class UpdateRule:
    """The settings of an update that are not the optimizer's.

    The moving average is ema * average + (1 - ema) * params after every update. It begins with the first weights, not
    with 0, so it has no bias to correct (as in timm's ModelEma, and in torch's AveragedModel with get_ema_avg_fn).
    """

    accumulate: int = 1  # number of batches of an update; their gradients are averaged
    ema: float = 0.0  # decay of the moving average of parameters; 0: no average
    skip_nonfinite: int = 0  # number of updates of a run that may be skipped because they are not finite
    frozen_pattern: str = ""  # pattern of the paths of parameters that are not trained; "": all are trained
    # pattern of the frozen parameters that checkpoints do not contain, because encoder.checkpoint has them; "":
    # checkpoints contain all
    base: str = ""
    base_dtype: str = "float32"  # type of the kernels and tables of the base

    def divide(self, params: Params) -> tuple[Params, Params]:
        """Return the parameters that are trained, and the frozen parameters cast to their types in the train
        state."""
        trainable_params, frozen_params = divide_parameters(params, self.frozen_pattern)
        return trainable_params, cast_base(frozen_params, self.base_dtype) if self.base else frozen_params


PLAIN_RULE = UpdateRule()


def make_update_rule(config: ConfigDict) -> UpdateRule:
    """Return the update rule of a config."""
    base = {"base": BASE, "base_dtype": config.lora.base_dtype} if config.lora.rank else {}
    numbers = config.train.accumulate, config.optimizer.ema, config.train.skip_nonfinite
    return UpdateRule(*numbers, frozen_pattern(config), **base)


def new_state(params: Params, optimizer: optax.GradientTransformation, rule: UpdateRule) -> TrainState:
    """Return the state before the first update of a model with these parameters."""
    trainable_params, frozen_params = rule.divide(params)
    return TrainState(
        trainable_params,
        optimizer.init(trainable_params),
        jnp.int32(0),
        jnp.array(True),
        jax.tree.map(jnp.copy, trainable_params) if rule.ema else None,
        jnp.int32(0) if rule.skip_nonfinite else None,
        frozen=frozen_params,
    )


def place_state(
    mesh: Mesh, params: Params, optimizer: optax.GradientTransformation, rule: UpdateRule = PLAIN_RULE
) -> TrainState:
    """Return the state of a new run on a mesh.

    Args:
        mesh: the devices.
        params: all parameters, on any device or on the host.
        optimizer: the optimizer whose state is made.
        rule: settings that decide whether there are frozen parameters, a moving average, and a counter of skipped
            updates.
    """
    trainable_params, frozen_params = (place_tree(mesh, part) for part in rule.divide(params))

    def without_params(params: Params) -> TrainState:
        return replace(new_state(params, optimizer, rule), params=None)

    state_shardings = shardings(mesh, jax.eval_shape(without_params, trainable_params))
    fresh_state = jax.jit(without_params, out_shardings=state_shardings)(trainable_params)
    return replace(fresh_state, params=trainable_params, frozen=frozen_params)


def checkpoint_trees(state: TrainState, rule: UpdateRule = PLAIN_RULE) -> tuple[Params, dict[str, Any]]:
    """Return the two trees of a checkpoint: the weights to encode with, and the rest of the state.

    The weights do not contain the base of adapters, which never changes. With a moving average, the weights are the
    average, and the parameters from which training resumes are saved as `trained`.
    """
    progress = {"opt_state": state.opt_state, "step": state.step, "healthy": state.healthy}
    if state.ema is not None:
        progress["trained"] = state.params
    if state.skip_count is not None:
        progress["skipped"] = state.skip_count
    return divide_parameters(state.weights, rule.base)[0], progress


def restore_state(
    checkpoints: Checkpoints,
    step: int,
    mesh: Mesh,
    model: Model,
    optimizer: optax.GradientTransformation,
    rule: UpdateRule = PLAIN_RULE,
    base: Params | None = None,
) -> TrainState:
    """Return the state of a checkpoint, placed on a mesh.

    Args:
        checkpoints: the checkpoints of the run.
        step: step of the checkpoint to restore.
        mesh: the devices; other devices may have saved the checkpoint.
        model: the model of the run.
        optimizer: the optimizer whose state is restored.
        rule: settings of the next updates. If they no longer allow skipped updates, the earlier ones stay counted,
            because they did not advance the schedule.
        base: parameters that checkpoints do not contain; None: checkpoints contain all.
    """
    counted = checkpoints.holds(step, "progress/skipped")

    def shapes(key: jax.Array) -> TrainState:
        return new_state(model.init(key), optimizer, replace(rule, skip_nonfinite=int(counted)))

    abstract = jax.eval_shape(shapes, jax.random.key(0))
    restored_params, progress = checkpoints.restore(step, *checkpoint_trees(sharded_shapes(mesh, abstract), rule))
    if base:
        base = place_tree(mesh, cast_base(base, rule.base_dtype))
    weights, frozen_params = divide_parameters(join_parameters(restored_params, base), rule.frozen_pattern)
    ema = weights if rule.ema else None
    zero = jax.device_put(jnp.int32(0), replicated_sharding(mesh))
    skips = progress.get("skipped", zero) if rule.skip_nonfinite or counted else None
    params = progress.get("trained", weights)
    return TrainState(
        params, progress["opt_state"], progress["step"], progress["healthy"], ema, skips, frozen=frozen_params
    )
