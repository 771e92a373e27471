"""The state of a run: parameters, optimizer and counters; how it is placed on a mesh, saved and restored."""

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
from jaxret.parallel.mesh import place_leaf, replicated_sharding, shardings
from jaxret.storage.checkpoint import Checkpoints
from jaxret.types import Params


@struct.dataclass
class TrainState:
    """Everything that a training step changes, and the parameters that it only reads: frozen ones, and a teacher's.

    Once a loss or gradient is not finite, and may not be skipped, `healthy` is False and nothing changes any more:
    params and step stay those before the bad step, so that it can be examined.
    """

    params: Any  # that gradients are taken of, and moments kept
    opt_state: optax.OptState  # of the optimizer
    step: jax.Array  # int32 [], updates made or skipped
    healthy: jax.Array  # bool []
    ema: Params | None = None  # the moving average of params; None: there is none
    skip_count: jax.Array | None = None  # int32 [], updates skipped; None: none may be, and none was
    teacher: Params | None = None  # parameters of another run, in no checkpoint of this one; None: the loss reads none
    frozen: Params = struct.field(default_factory=dict)  # the model's other parameters

    @property
    def weights(self) -> Params:
        """All parameters, for validation, encoding and search."""
        return join_parameters(self.params if self.ema is None else self.ema, self.frozen)


@dataclass(frozen=True)
class UpdateRule:
    """How an update is made, beside the optimizer.

    The moving average is ema * average + (1 - ema) * params after every update. It begins with the first weights, which
    are pre-trained: there is no zero whose bias would have to be corrected (as timm's ModelEma, and torch's
    AveragedModel with get_ema_avg_fn).
    """

    accumulate: int = 1  # batches whose mean gradient an update takes
    ema: float = 0.0  # decay of the moving average of parameters; 0: none
    skip_nonfinite: int = 0  # how many updates of a run may be skipped for not being finite
    frozen_pattern: str = ""  # pattern of the paths of parameters that are not trained; "": all are
    # pattern of the frozen ones that checkpoints do not hold, because they are those of encoder.checkpoint; "":
    # checkpoints hold all
    base: str = ""
    base_dtype: str = "float32"  # of the kernels and tables among these

    def divide(self, params: Params) -> tuple[Params, Params]:
        """Return the parameters that are trained, and the frozen ones in the types in which they are kept."""
        trainable_params, frozen_params = divide_parameters(params, self.frozen_pattern)
        return trainable_params, cast_base(frozen_params, self.base_dtype) if self.base else frozen_params


PLAIN_RULE = UpdateRule()


def make_update_rule(config: ConfigDict) -> UpdateRule:
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
    """Return a new run's state on a mesh.

    Args:
        params: all parameters, on any device or on the host.
        optimizer: whose state is made.
        rule: whether there are frozen parameters, a moving average, and a counter of skipped updates.
    """
    trainable_params, others = (jax.tree.map(place_leaf, part, shardings(mesh, part)) for part in rule.divide(params))

    def without_params(params: Params) -> TrainState:
        return replace(new_state(params, optimizer, rule), params=None)

    state_shardings = shardings(mesh, jax.eval_shape(without_params, trainable_params))
    fresh_state = jax.jit(without_params, out_shardings=state_shardings)(trainable_params)
    return replace(fresh_state, params=trainable_params, frozen=others)


def checkpoint_trees(state: TrainState, rule: UpdateRule = PLAIN_RULE) -> tuple[Params, dict[str, Any]]:
    """Return the two trees of a checkpoint: the weights to use from then on, and everything else.

    The weights lack the base of adapters, which stays as it is. With a moving average its parameters are the weights,
    and those that training resumes from are saved as `trained`.
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
        mesh: the devices, which need not be those that saved it.
        model: whose parameters they are.
        optimizer: whose state is restored.
        rule: of the updates to come. Whether updates may be skipped can have changed since; skipped ones stay counted,
            because the schedule does not count them.
        base: parameters that checkpoints do not hold; None: there are none.
    """
    counted = checkpoints.holds(step, "progress/skipped")

    def shapes(key: jax.Array) -> TrainState:
        return new_state(model.init(key), optimizer, replace(rule, skip_nonfinite=int(counted)))

    abstract = jax.eval_shape(shapes, jax.random.key(0))
    abstract_params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings(mesh, abstract),
    )
    restored_params, progress = checkpoints.restore(step, *checkpoint_trees(abstract_params, rule))
    if base:
        base = jax.tree.map(place_leaf, cast_base(base, rule.base_dtype), shardings(mesh, base))
    weights, frozen_params = divide_parameters(join_parameters(restored_params, base), rule.frozen_pattern)
    ema = weights if rule.ema else None
    zero = jax.device_put(jnp.int32(0), replicated_sharding(mesh))
    skips = progress.get("skipped", zero) if rule.skip_nonfinite or counted else None
    params = progress.get("trained", weights)
    return TrainState(
        params, progress["opt_state"], progress["step"], progress["healthy"], ema, skips, frozen=frozen_params
    )
