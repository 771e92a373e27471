"""Optimizers: AdamW and LAMB with linear warm-up, a decay, and clipping by global norm."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxret.models.lora import ADAPTER
from jaxret.models.model import Model, parameter_shapes
from jaxret.models.partition import divide_parameters, frozen_pattern
from jaxret.parallel.mesh import path_name

# Schedules of the learning rate after warm-up, (peak, steps left) -> schedule, by optimizer.decay.
DECAYS: dict[str, Callable[[float, int], optax.Schedule]] = {
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": optax.cosine_decay_schedule,  # peak (1 + cos(pi t)) / 2, t from 0 to 1 (Loshchilov & Hutter 2017, eq. 5)
    "none": lambda peak, steps: optax.constant_schedule(peak),
}


def make_schedule(decay: str, peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Return the learning rate by update. It rises from 0 to `peak` in the warm-up; then it decays to 0 at
    `total_steps` or stays. Raises ValueError for an unknown decay.

    Args:
        decay: a key of DECAYS.
        peak: the largest rate.
        warmup_steps: number of steps in which the rate rises linearly.
        total_steps: number of steps of the training, warm-up included.
    """
    if decay not in DECAYS:
        raise ValueError(f"optimizer.decay is {decay!r}; it must be one of {', '.join(DECAYS)}")
    after_warmup = DECAYS[decay](peak, max(total_steps - warmup_steps, 1))
    if not warmup_steps:
        return after_warmup
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), after_warmup], [warmup_steps])


def decay_mask(params: Any) -> Any:
    """Return a tree with True for kernels, adapters and embedding tables. Biases, norms and mixing weights have False:
    they have no weight decay."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        return path_name(path).endswith(("kernel", "embedding", "lora_a", "lora_b"))

    return jax.tree_util.tree_map_with_path(decays, params)


def per_layer_norm(path: str, leaf: jax.Array) -> jax.Array:
    """Return the norm of a parameter. A stack of layers has the norm of each layer, in a shape that broadcasts, because
    reference implementations have a tensor per layer."""
    axes = tuple(range(1, leaf.ndim)) if "layers/" in path else None
    return jnp.sqrt(jnp.sum(leaf**2, axis=axes, keepdims=True))


def scale_by_trust_ratio(largest_norm: float = math.inf) -> optax.GradientTransformation:
    """Return LAMB's layer-wise scaling: update * min(|w|, largest_norm) / |update|. The factor is 1 if one of the norms
    is 0 (You et al. 2020, algorithm 2)."""

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        def scaled(path: tuple[Any, ...], direction: jax.Array, weights: jax.Array) -> jax.Array:
            norm = jnp.minimum(per_layer_norm(path_name(path), weights), largest_norm)
            size = per_layer_norm(path_name(path), direction)
            ratio = jnp.where((norm > 0) & (size > 0), norm / jnp.where(size > 0, size, 1.0), 1.0)
            return direction * ratio

        return jax.tree_util.tree_map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def scale_by_biased_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Return Adam's update m / (sqrt(v) + eps) without bias correction. I3 was trained with a LAMB of this kind
    (torch_optimizer)."""

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        first = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.mu)
        second = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g**2, updates, state.nu)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), first, second)
        return steps, optax.ScaleByAdamState(state.count + 1, first, second)

    return optax.GradientTransformation(init, update)


def matching_parameters(regex: re.Pattern[str], params: Any) -> Any:
    """Return a tree with True for parameters whose path matches a pattern."""
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(regex.search(path_name(path))), params)


def require_some(key: str, pattern: str, params: Any) -> None:
    """Raise ValueError if the pattern of a config key matches none or all of a model's parameters, or is not a regular
    expression."""
    matches = jax.tree.leaves(matching_parameters(compile_pattern(key, pattern), params))
    if not any(matches) or all(matches):
        quantity = "all" if all(matches) else "none"
        raise ValueError(f"optimizer.{key} is {pattern!r}, which matches {quantity} of the parameters")


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Return the pattern of a config key. Raises ValueError if it is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"optimizer.{key} is {pattern!r}, which is not a regular expression: {error}") from error


def check_optimizer(config: ConfigDict) -> None:
    """Raise ValueError for an unknown optimizer or decay, a pattern that is not a regular expression, or a learning
    rate that is not positive."""
    make_optimizer(config, 1)
    compile_pattern("frozen", config.frozen)
    if config.learning_rate <= 0:
        raise ValueError(f"optimizer.learning_rate is {config.learning_rate}; it must be positive")


def check_parameters(config: ConfigDict, model: Model) -> None:
    """Raise ValueError for a pattern of `config.optimizer` that matches none or all of a model's parameters, and for an
    optimizer that cannot train adapters."""
    optimizer, _ = make_optimizer(config.optimizer, max(config.train.steps, 1))
    params = parameter_shapes(model)
    if config.optimizer.frozen:
        require_some("frozen", config.optimizer.frozen, params)
    if config.optimizer.head_learning_rate:
        require_some("head_parameters", config.optimizer.head_parameters, params)
    trainable_params, _ = divide_parameters(params, frozen_pattern(config))
    if config.lora.rank and config.optimizer.name != "adamw":
        raise ValueError(
            f"optimizer.name is {config.optimizer.name!r} and lora.rank {config.lora.rank}: LAMB scales the update of "
            "a parameter by its norm, which is 0 for new adapters, so they hardly change. Set optimizer.name='adamw'"
        )
    if not trainable_params:
        raise ValueError(f"optimizer.frozen is {config.optimizer.frozen!r}, which leaves no parameter to train")
    if config.lora.rank and not divide_parameters(trainable_params, ADAPTER)[1]:
        raise ValueError(
            f"optimizer.frozen is {config.optimizer.frozen!r}, which matches every adapter of lora.rank "
            f"{config.lora.rank}: set one of them to its default"
        )
    jax.eval_shape(optimizer.init, trainable_params)


def warmup_length(config: ConfigDict, total_steps: int) -> int:
    """Return the steps of the warm-up of `config.optimizer`."""
    return config.warmup_steps if config.warmup_steps >= 0 else round(config.warmup_fraction * total_steps)


def describe_long_warmup(config: ConfigDict, total_steps: int) -> str:
    """Return a warning if the warm-up of `config.optimizer` is longer than the training, else "". It is not an error,
    because a short run of a published config may have such a warm-up."""
    steps = warmup_length(config, total_steps)
    if not 0 < total_steps < steps:
        return ""
    return (
        f"optimizer.warmup_steps is {steps}, but the schedule has {total_steps} steps: the learning rate ends at "
        f"{config.learning_rate * (total_steps - 1) / steps:.3g} and never reaches {config.learning_rate:g}"
    )


def make_optimizer(config: ConfigDict, total_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return the optimizer of `config.optimizer` and its learning rate. Raises ValueError for an unknown name."""
    schedule = make_schedule(config.decay, config.learning_rate, warmup_length(config, total_steps), total_steps)
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    moments = {
        "adamw": (adam, optax.identity()),
        "lamb": (adam, scale_by_trust_ratio()),
        "lamb_reference": (
            scale_by_biased_adam(config.b1, config.b2, config.eps),
            scale_by_trust_ratio(largest_norm=10.0),
        ),
    }
    if config.name not in moments:
        raise ValueError(f"optimizer.name is {config.name!r}; it must be one of {', '.join(moments)}")
    direction, ratio = moments[config.name]
    heads = optax.identity()
    if config.head_learning_rate:
        faster = partial(matching_parameters, compile_pattern("head_parameters", config.head_parameters))
        heads = optax.masked(optax.scale(config.head_learning_rate / config.learning_rate), faster)
    largest_norm = config.clip_norm * config.reference_processes
    return optax.chain(
        optax.clip_by_global_norm(largest_norm) if config.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        ratio,
        heads,
        optax.scale_by_learning_rate(schedule),
    ), schedule
