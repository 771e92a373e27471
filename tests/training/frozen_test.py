"""Frozen parameters do not change, and have neither gradients nor moments, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxret.models.partition import divide_parameters, join_parameters
from jaxret.parallel.mesh import make_mesh, path_name, shard_batch
from jaxret.plan.hlo import collectives, parse_hlo
from jaxret.storage.checkpoint import Checkpoints
from jaxret.training.optimizers import make_optimizer
from jaxret.training.starting_weights import init_state
from jaxret.training.step import make_train_step
from jaxret.training.train_state import TrainState, checkpoint_trees, make_update_rule, restore_state
from tests.tiny import (
    DUAL_ENCODER,
    I3,
    LATE_INTERACTION,
    OPTIMIZER,
    WITHOUT_DROPOUT,
    make_batch,
    make_config,
    make_objective,
    make_params,
    make_retriever,
    relative_error,
)

KERNELS = {"optimizer.frozen": "(query|passage)_encoder/.*kernel"}
FIRST_MOMENT = "mu/"


class Run:
    """Three training steps of a config on a mesh."""

    def __init__(self, settings: dict[str, Any], devices: int = 1, fsdp: int = 1, steps: int = 3) -> None:
        settings = settings | OPTIMIZER
        config, mesh = make_config(settings), make_mesh(fsdp, jax.devices()[:devices])
        self.rule = make_update_rule(config)
        self.objective = make_objective(settings, mesh, WITHOUT_DROPOUT)
        self.optimizer, _ = make_optimizer(config.optimizer, total_steps=10)
        pretrained = jax.tree.map(np.array, make_params(make_retriever({"encoder.tied": True}, WITHOUT_DROPOUT)))
        self.state = init_state(config, mesh, self.objective.model, pretrained["encoder"], self.optimizer)
        self.start = jax.device_get(self.state.weights)
        self.program = make_train_step(self.objective, self.optimizer, self.state, jax.random.key(9), self.rule)
        self.metrics: list[dict[str, Any]] = []
        for seed in range(steps):
            batch = self.batch(seed)
            self.state, metrics = self.program(self.state, batch)
            self.metrics.append(jax.device_get(metrics))

    def batch(self, seed: int) -> Any:
        pseudo = self.objective.model.module.head.pseudo_query_length()
        batch = make_batch(8, 2, seed, pseudo_queries=bool(pseudo))
        if (count := self.rule.accumulate) > 1:
            batch = jax.tree.map(lambda x: np.stack([x] * count), batch)
        return shard_batch(self.objective.mesh, batch, stacked=self.rule.accumulate > 1)


def paths(tree: Any) -> set[str]:
    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_a_tree_is_split_by_path_and_joined_again() -> None:
    tree = {"a": {"kernel": 1, "bias": 2}, "b": {"deep": {"kernel": 3}}, "kernel": 4}
    others, kernels = divide_parameters(tree, "kernel$")
    assert others == {"a": {"bias": 2}}
    assert kernels == {"a": {"kernel": 1}, "b": {"deep": {"kernel": 3}}, "kernel": 4}
    assert join_parameters(others, kernels) == tree
    assert divide_parameters(tree, "^b/deep", "")[1] == {"b": {"deep": {"kernel": 3}}}
    assert divide_parameters(tree, "^b/deep", "x/")[1] == {}
    assert divide_parameters(tree, "") == (tree, {})


@pytest.mark.daily("late_interaction")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        pytest.param(DUAL_ENCODER, KERNELS["optimizer.frozen"], id="kernels"),
        pytest.param(LATE_INTERACTION, "encoder/", marks=pytest.mark.exhaustive, id="late_interaction"),
        pytest.param(I3, "encoder/", marks=pytest.mark.exhaustive, id="i3"),
    ],
)
def test_frozen_parameters_stay_and_have_no_moments(settings: dict[str, Any], pattern: str) -> None:
    run = Run(settings | {"optimizer.frozen": pattern})
    trained, frozen = divide_parameters(run.start, pattern)
    assert paths(frozen)
    assert paths(run.state.frozen) == paths(frozen)
    assert paths(run.state.params) == paths(trained)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state.frozen), frozen)
    moments = [path for path in paths(run.state.opt_state) if FIRST_MOMENT in path]
    assert len(moments) == len(paths(trained)), "every trained parameter has a moment, and no other"
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), run.state.params, trained))
    assert np.median(moved) > 1e-4
    free = Run(settings, steps=0)
    assert len([p for p in paths(free.state.opt_state) if FIRST_MOMENT in p]) == len(paths(run.start)), (
        "control: without freezing, every parameter has a moment"
    )


@pytest.mark.slow
def test_frozen_parameters_do_not_affect_the_gradient_norm() -> None:
    """The first gradient of the trained parameters equals that of a step that trains all parameters."""
    frozen, free = Run(KERNELS, steps=1), Run({}, steps=1)
    assert frozen.metrics[0]["loss"] == pytest.approx(free.metrics[0]["loss"], rel=1e-6)
    assert frozen.metrics[0]["gradient_norm"] < 0.9 * free.metrics[0]["gradient_norm"]
    ours, theirs = (first_moments(run.state) for run in (frozen, free))
    clips = {name: min(1, 2 / run.metrics[0]["gradient_norm"]) for name, run in (("ours", frozen), ("theirs", free))}
    ratio = clips["theirs"] / clips["ours"]
    for path, moment in ours.items():
        np.testing.assert_allclose(moment * ratio, theirs[path], rtol=2e-5, atol=1e-8)


def first_moments(state: TrainState) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_leaves_with_path(state.opt_state)
    named = {path_name(path): np.asarray(leaf) for path, leaf in flat}
    return {path.partition(FIRST_MOMENT)[2]: leaf for path, leaf in named.items() if FIRST_MOMENT in path}


@pytest.mark.daily("1-4")
@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [pytest.param(0, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_eight_devices_equal_one(chunk_size: int, accumulate: int) -> None:
    settings = KERNELS | {"train.chunk_size": chunk_size, "train.accumulate": accumulate}
    one, many = Run(settings), Run(settings, 8, 4)
    assert relative_error(jax.device_get(one.state.params), jax.device_get(many.state.params)) < 1e-5
    for ours, theirs in zip(one.metrics, many.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
def test_no_gradient_of_frozen_parameters_is_computed_or_sent() -> None:
    reduced = {}
    for name, settings in (("frozen", {"optimizer.frozen": "encoder/.*(kernel|embedding)"}), ("free", {})):
        run = Run(settings, 8, 4, steps=0)
        compiled = run.program.trace(run.state, run.batch(0)).lower().compile()
        operations = collectives(parse_hlo(compiled.as_text()), 8)
        reduced[name] = [op for op in operations if "reduce-scatter" in op.kind or "all-to-all" in op.kind]
    assert reduced["free"], "control: gradients of split parameters are reduced"
    assert not reduced["frozen"]


@pytest.mark.slow
def test_a_checkpoint_has_frozen_parameters_without_moments(tmp_path: Path) -> None:
    run = Run(KERNELS | {"optimizer.ema": 0.5})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, *checkpoint_trees(run.state))
        checkpoints.wait()
        assert checkpoints.holds(3, "params/passage_encoder/layers/attention/query/kernel")
        arguments = run.objective.mesh, run.objective.model, run.optimizer, run.rule
        restored = restore_state(checkpoints, 3, *arguments)
    for before, after in ((run.state.params, restored.params), (run.state.ema, restored.ema)):
        jax.tree.map(np.testing.assert_array_equal, before, after)
    jax.tree.map(np.testing.assert_array_equal, run.state.frozen, restored.frozen)
    jax.tree.map(np.testing.assert_array_equal, run.state.opt_state, restored.opt_state)
