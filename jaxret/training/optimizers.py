"""AdamW with linear warm-up and decay, and clipping by global norm."""

from __future__ import annotations

from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from jaxret.checkpoint import path_name


def linear_schedule(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """0 at the first update, `peak` after `warmup_steps`, 0 again at `total_steps`."""
    up = optax.linear_schedule(0.0, peak, max(warmup_steps, 1))
    down = optax.linear_schedule(peak, 0.0, max(total_steps - warmup_steps, 1))
    return optax.join_schedules([up, down], [warmup_steps]) if warmup_steps else down


def decay_mask(params: Any) -> Any:
    """True for kernels and embedding tables; biases, layer norms and mixing weights are never decayed."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        return path_name(path).endswith(("kernel", "embedding"))

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: ConfigDict, total_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Config -> (optimizer, learning-rate schedule)."""
    schedule = linear_schedule(config.learning_rate, round(config.warmup_fraction * total_steps), total_steps)
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decay_mask
    )
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, adamw), schedule
