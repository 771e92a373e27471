"""AdamW, its schedule, its clipping and its decay, against 20 stored updates of torch's (tests/goldens/adamw.npz)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxret.training.optimizers import decay_mask, linear_schedule, make_optimizer
from tests.tiny import SCALAR_MIX, make_config, make_retriever

STEPS, WARMUP, PEAK = 20, 5, 1e-3
GOLDEN = {
    "optimizer.learning_rate": PEAK,
    "optimizer.warmup_fraction": 0.25,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip_norm": 1.0,
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "goldens" / "adamw.npz", allow_pickle=False) as file:
        return dict(file)


def farthest(golden: dict[str, np.ndarray], overrides: dict[str, Any]) -> float:
    """The largest difference of any parameter after any update."""
    optimizer, _ = make_optimizer(make_config(GOLDEN | overrides).optimizer, STEPS)
    params = {name: jnp.asarray(golden[f"trajectory/{name}"][0]) for name in ("kernel", "bias")}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    worst = 0.0
    for step in range(STEPS):
        gradients = {name: jnp.asarray(golden[f"gradients/{name}"][step]) for name in params}
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for name, value in params.items():
            worst = max(worst, float(np.abs(value - golden[f"trajectory/{name}"][step + 1]).max()))
    return worst


def test_the_trajectory_is_that_of_torch(golden: dict[str, np.ndarray]) -> None:
    assert farthest(golden, {}) <= 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer.clip_norm": 0.0},
        {"optimizer.weight_decay": 0.0},
        {"optimizer.weight_decay": 0.02},
        {"optimizer.warmup_fraction": 0.2},
        {"optimizer.learning_rate": 1.01e-3},
        {"optimizer.b1": 0.89},
        {"optimizer.b2": 0.99},
        {"optimizer.eps": 1e-3},
    ],
    ids=str,
)
def test_control_every_setting_reaches_the_optimizer(golden: dict[str, np.ndarray], change: dict[str, Any]) -> None:
    assert farthest(golden, change) > 5e-6


def test_learning_rates_are_those_of_the_golden_run(golden: dict[str, np.ndarray]) -> None:
    _, schedule = make_optimizer(make_config(GOLDEN).optimizer, STEPS)
    np.testing.assert_allclose([schedule(step) for step in range(STEPS)], golden["learning_rates"], rtol=1e-6)
    assert golden["learning_rates"][0] == 0.0


@pytest.mark.parametrize(("warmup", "total"), [(5, 20), (1, 2), (3, 100)])
def test_the_schedule_is_exact_at_its_corners(warmup: int, total: int) -> None:
    schedule = linear_schedule(PEAK, warmup, total)
    assert float(schedule(0)) == 0.0
    assert float(schedule(warmup)) == np.float32(PEAK)
    assert float(schedule(total)) == 0.0
    np.testing.assert_allclose(schedule(total - 1), PEAK / (total - warmup), rtol=1e-5)
    assert max(float(schedule(step)) for step in range(total + 1)) == np.float32(PEAK)


def test_without_warm_up_the_first_update_has_the_peak() -> None:
    schedule = linear_schedule(PEAK, 0, 10)
    assert float(schedule(0)) == np.float32(PEAK)
    assert float(schedule(10)) == 0.0


def test_kernels_and_tables_decay_and_nothing_else_does() -> None:
    params = jax.eval_shape(make_retriever(SCALAR_MIX).init, jax.random.key(0))
    names = {"kernel": True, "embedding": True, "bias": False, "scale": False, "alpha": False}
    leaves = jax.tree_util.tree_leaves_with_path(decay_mask(params))
    assert {path[-1].key for path, _ in leaves} == set(names)
    for path, decays in leaves:
        assert decays is names[path[-1].key], path
