"""AdamW, its schedule, clipping and decay, against 20 stored updates of torch (tests/goldens/adamw.npz)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxret.training.optimizers import (
    DECAYS,
    check_parameters,
    decay_mask,
    describe_long_warmup,
    make_optimizer,
    make_schedule,
)
from tests.tiny import LATE_INTERACTION, SCALAR_MIX, make_config, make_retriever

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
    """Return the largest difference of any parameter after any update."""
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


def test_the_trajectory_equals_torch(golden: dict[str, np.ndarray]) -> None:
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


def test_learning_rates_equal_the_golden_run(golden: dict[str, np.ndarray]) -> None:
    _, schedule = make_optimizer(make_config(GOLDEN).optimizer, STEPS)
    np.testing.assert_allclose([schedule(step) for step in range(STEPS)], golden["learning_rates"], rtol=1e-6)
    assert golden["learning_rates"][0] == 0.0


@pytest.mark.parametrize(("warmup", "total"), [(5, 20), (1, 2), (3, 100)])
def test_the_schedule_is_exact_at_its_corners(warmup: int, total: int) -> None:
    schedule = make_schedule("linear", PEAK, warmup, total)
    assert float(schedule(0)) == 0.0
    assert float(schedule(warmup)) == np.float32(PEAK)
    assert float(schedule(total)) == 0.0
    np.testing.assert_allclose(schedule(total - 1), PEAK / (total - warmup), rtol=1e-5)
    assert max(float(schedule(step)) for step in range(total + 1)) == np.float32(PEAK)


def test_without_warm_up_the_first_update_has_the_peak() -> None:
    schedule = make_schedule("linear", PEAK, 0, 10)
    assert float(schedule(0)) == np.float32(PEAK)
    assert float(schedule(10)) == 0.0


def test_kernels_and_tables_decay_and_nothing_else_does() -> None:
    params = jax.eval_shape(make_retriever(SCALAR_MIX).init, jax.random.key(0))
    names = {"kernel": True, "embedding": True, "bias": False, "scale": False, "alpha": False}
    leaves = jax.tree_util.tree_leaves_with_path(decay_mask(params))
    assert {path[-1].key for path, _ in leaves} == set(names)
    for path, decays in leaves:
        assert decays is names[path[-1].key], path


LAMB = {"optimizer.name": "lamb", "optimizer.eps": 1e-6, "optimizer.warmup_fraction": 0.0, "optimizer.decay": "none"}


def a_tree(seed: int, layers: int = 3) -> dict[str, Any]:
    """A stack of layers with norms far apart (one of zeros, one above 10), a table, and a head."""
    generator = np.random.default_rng(seed)
    scales = np.array([0.0, 0.3, 9.0])[:, None, None]
    tree = {
        "encoder": {
            "layers": {"output": {"kernel": generator.standard_normal((layers, 4, 5)) * scales}},
            "embeddings": {"word": {"embedding": generator.standard_normal((7, 3))}},
        },
        "passage_head": {"interactor_layers": {"output": {"bias": generator.standard_normal((layers, 5))}}},
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def unstacked(tree: dict[str, Any]) -> dict[str, jax.Array]:
    """Make each layer a separate tensor, as other trainers do."""
    flat: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        flat |= {f"{name}{i}": part for i, part in enumerate(leaf)} if "layers" in name else {name: leaf}
    return flat


def trajectory(optimizer: optax.GradientTransformation, params: Any, gradients: list[Any]) -> Any:
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(params: dict[str, Any], expected: dict[str, Any]) -> None:
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_lamb_equals_optax_lamb_of_separate_layers() -> None:
    config = make_config(LAMB | {"optimizer.learning_rate": 0.1, "optimizer.clip_norm": 0.0}).optimizer
    optimizer, _ = make_optimizer(config, STEPS)
    gradients = [a_tree(seed) for seed in range(1, 6)]
    params = unstacked(trajectory(optimizer, a_tree(0), gradients))
    theirs = optax.lamb(0.1, b1=0.9, b2=0.999, eps=1e-6)
    expected = trajectory(theirs, unstacked(a_tree(0)), [unstacked(g) for g in gradients])
    assert_close(params, expected)
    # Control: one ratio for all layers gives another step.
    stacked = unstacked(trajectory(theirs, a_tree(0), gradients))
    name = next(name for name in params if "kernel" in name and name.endswith("1"))
    assert np.abs(np.asarray(params[name]) - np.asarray(stacked[name])).max() > 1e-3


def lamb_by_hand(params: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """LAMB's reference form in float64: no bias correction, weight norm clamped at 10, ratio 1 where a norm is 0."""
    m = {name: np.zeros_like(value) for name, value in params.items()}
    v = {name: np.zeros_like(value) for name, value in params.items()}
    for gradient in gradients:
        for name, g in gradient.items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            step = m[name] / (np.sqrt(v[name]) + 1e-6)
            if name.endswith(("['embedding']",)) or "kernel" in name:
                step = step + 0.01 * params[name]
            weight, size = min(float(np.linalg.norm(params[name])), 10.0), float(np.linalg.norm(step))
            rate = 1e-3 if "head" in name else 0.1
            params[name] = params[name] - rate * (weight / size if weight and size else 1.0) * step
    return params


def test_the_reference_lamb_with_its_two_rates() -> None:
    settings = {
        "optimizer.name": "lamb_reference",
        "optimizer.learning_rate": 0.1,
        "optimizer.head_learning_rate": 1e-3,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip_norm": 0.0,
    }
    optimizer, _ = make_optimizer(make_config(LAMB | settings).optimizer, STEPS)
    gradients = [a_tree(seed) for seed in range(1, 6)]
    params = unstacked(trajectory(optimizer, a_tree(0), gradients))

    def wide(tree: Any) -> dict[str, np.ndarray]:
        return {name: np.asarray(value, np.float64) for name, value in unstacked(tree).items()}

    assert_close(params, lamb_by_hand(wide(a_tree(0)), [wide(g) for g in gradients]))
    # Control: both settings have an effect.
    for change in ({"optimizer.name": "lamb"}, {"optimizer.head_learning_rate": 0.0}):
        other, _ = make_optimizer(make_config(LAMB | settings | change).optimizer, STEPS)
        differs = unstacked(trajectory(other, a_tree(0), gradients))
        assert max(float(np.abs(differs[name] - value).max()) for name, value in params.items()) > 1e-3


def test_without_decay_the_rate_stays() -> None:
    _, schedule = make_optimizer(
        make_config({"optimizer.decay": "none", "optimizer.warmup_fraction": 0.1}).optimizer, 20
    )
    np.testing.assert_allclose([float(schedule(s)) for s in (0, 1, 2, 10, 20)], [0, 1e-5, 2e-5, 2e-5, 2e-5], rtol=1e-6)


def by_hand(decay: str, warmup: int, total: int) -> np.ndarray:
    """The learning rates of all updates and of the one after the last, in float64."""
    step = np.arange(total + 1, dtype=np.float64)
    gone = (step - warmup) / (total - warmup)
    after = {"linear": 1 - gone, "cosine": 0.5 * (1 + np.cos(np.pi * gone)), "none": np.ones(total + 1)}[decay]
    return PEAK * np.where(step < warmup, step / max(warmup, 1), after)


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (5, 20), (1, 2), (3, 100)])
@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_equals_its_formula(decay: str, warmup: int, total: int) -> None:
    schedule = make_schedule(decay, PEAK, warmup, total)
    rates = np.array([float(schedule(step)) for step in range(total + 1)])
    np.testing.assert_allclose(rates, by_hand(decay, warmup, total), rtol=1e-5, atol=1e-10)
    assert np.float32(rates[total]) == (np.float32(PEAK) if decay == "none" else 0.0)
    for other in DECAYS.keys() - {decay}:
        if total - warmup > 1:
            assert np.abs(rates - by_hand(other, warmup, total)).max() > PEAK / 25, (
                "control: another decay has other rates"
            )


@pytest.mark.parametrize(
    ("decay", "theirs"),
    [
        ("linear", "get_linear_schedule_with_warmup"),
        ("cosine", "get_cosine_schedule_with_warmup"),
        ("none", "get_constant_schedule_with_warmup"),
    ],
)
def test_schedules_equal_transformers(decay: str, theirs: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    lengths = (WARMUP,) if decay == "none" else (WARMUP, STEPS)
    scheduler, rates = getattr(transformers, theirs)(optimizer, *lengths), []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    _, schedule = make_optimizer(make_config(GOLDEN | {"optimizer.decay": decay}).optimizer, STEPS)
    np.testing.assert_allclose([float(schedule(step)) for step in range(STEPS)], rates, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize(
    ("decay", "before", "now"), [("linear", 0.2, 0.6), ("cosine", 0.0954915, 0.6545085), ("none", 1, 1)]
)
def test_learning_rates_of_a_lengthened_run(decay: str, before: float, now: float) -> None:
    """The rates of step 8 in a run of 10 steps and in one of 20, without warm-up."""
    rates = [float(make_schedule(decay, 1.0, 0, total)(8)) for total in (10, 20)]
    assert rates == pytest.approx([before, now], rel=1e-5)


@pytest.mark.parametrize("key", ["name", "decay"])
def test_unknown_names(key: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer.{key} is 'sgd'; it must be"):
        make_optimizer(make_config({f"optimizer.{key}": "sgd"}).optimizer, 10)


@pytest.mark.parametrize(("pattern", "what"), [("nothing", "none"), (".", "all")])
def test_a_pattern_that_freezes_nothing_or_everything(pattern: str, what: str) -> None:
    config = make_config({"optimizer.frozen": pattern})
    with pytest.raises(ValueError, match=rf"which matches {what} of the parameters"):
        check_parameters(config, make_retriever({"optimizer.frozen": pattern}))


def test_heads_may_have_a_rate_with_a_frozen_encoder() -> None:
    keys = {"optimizer.frozen": "encoder/", "optimizer.head_learning_rate": 0.1}
    retriever = make_retriever(keys | LATE_INTERACTION)
    check_parameters(make_config(keys | LATE_INTERACTION), retriever)
    for pattern, what in (("nothing", "none"), (".", "all")):
        with pytest.raises(ValueError, match=rf"optimizer.head_parameters .*matches {what}"):
            check_parameters(make_config(keys | LATE_INTERACTION | {"optimizer.head_parameters": pattern}), retriever)


@pytest.mark.parametrize("processes", [1, 4])
def test_clipping_with_reference_processes(processes: int) -> None:
    """A gradient of norm 3 is clipped at the number of processes."""
    changes = {"optimizer.clip_norm": 1.0, "optimizer.reference_processes": processes, "optimizer.eps": 10.0}
    config = make_config(changes | {"optimizer.decay": "none", "optimizer.warmup_fraction": 0.0}).optimizer
    optimizer, _ = make_optimizer(config, 10)
    params = {"layer": {"kernel": jnp.zeros(9)}}
    updates, _ = optimizer.update({"layer": {"kernel": jnp.ones(9)}}, optimizer.init(params), params)
    clipped = min(1.0, processes / 3)
    expected = -config.learning_rate * clipped / (clipped + 10.0)  # Adam's first step, where eps counts
    np.testing.assert_allclose(updates["layer"]["kernel"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [
        ({"optimizer.warmup_steps": 8}, 4, r"optimizer.warmup_steps .*8, .*4 steps: .*0.000375 .*0.001"),
        ({"optimizer.warmup_steps": 8}, 8, ""),
        ({"optimizer.warmup_steps": 8}, 0, ""),
        ({"optimizer.warmup_fraction": 1.0}, 4, ""),
    ],
)
def test_a_warmup_that_never_ends_has_a_warning(warmup: dict[str, Any], steps: int, expected: str) -> None:
    config = make_config({"optimizer.learning_rate": PEAK, **warmup}).optimizer
    warning = describe_long_warmup(config, steps)
    assert re.match(expected, warning)
    assert bool(warning) == bool(expected)
    if warning:
        rate = make_optimizer(config, steps)[1](steps - 1)
        assert f"ends at {float(rate):.3g} " in warning
