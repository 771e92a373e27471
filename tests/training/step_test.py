"""One training step: the same on one device and on eight, sound at step 0, and unmoved by what is not finite."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxret.distributed import make_mesh, shard_batch
from jaxret.training.optimizers import make_optimizer
from jaxret.training.state import init_state
from jaxret.training.step import TrainState, make_eval_step, make_train_step
from jaxret.types import Batch, Tokens
from tests.tiny import (
    DUAL_ENCODER,
    OPTIMIZER,
    SELF_CONTRASTIVE,
    distance,
    make_batch,
    make_config,
    make_objective,
    make_params,
    make_retriever,
    relative_error,
)

QUERIES, GROUP, STEPS = 8, 2, 4
MESHES = {"1": (1, 1), "8x1": (8, 1), "4x2": (8, 2)}  # name -> (devices, fsdp)
FAMILIES = {"dual_encoder": DUAL_ENCODER, "self_contrastive": SELF_CONTRASTIVE}
TOLERANCE = 1e-6  # relative, of all parameters or moments: devices add up in another order
LEAF_TOLERANCE = 1e-5  # of one array among them


def mesh_of(name: str) -> Any:
    devices, fsdp = MESHES[name]
    return make_mesh(fsdp, jax.devices()[:devices])


class Trainer:
    """A step and the state it begins with, on one of the meshes."""

    def __init__(self, family: str, mesh: str) -> None:
        config = make_config(FAMILIES[family] | OPTIMIZER)
        self.mesh = mesh_of(mesh)
        self.objective = make_objective(FAMILIES[family], self.mesh)
        self.optimizer, _ = make_optimizer(config.optimizer, total_steps=10)
        pretrained = jax.tree.map(np.array, make_params(make_retriever({"encoder.tied": True}))["encoder"])
        self.state = init_state(config, self.mesh, self.objective.retriever, pretrained, self.optimizer)
        self.step = make_train_step(self.objective, self.optimizer, self.state, jax.random.key(9))

    def batch(self, seed: int) -> Batch:
        return shard_batch(self.mesh, make_batch(QUERIES, GROUP, seed))

    def run(self, steps: int) -> list[tuple[TrainState, dict[str, float]]]:
        """Host copies of every state, and the metrics; the step gives the old state's memory away."""
        history = []
        for seed in range(steps):
            self.state, metrics = self.step(self.state, self.batch(seed))
            history.append((host(self.state), jax.tree.map(float, metrics)))
        return history


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x), tree)


@functools.cache
def trained(family: str, mesh: str) -> tuple[Trainer, Any, list[tuple[TrainState, dict[str, float]]]]:
    """(trainer, its first state, what its first steps gave)."""
    trainer = Trainer(family, mesh)
    first = host(trainer.state)
    return trainer, first, trainer.run(STEPS)


@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_devices_are_one(family: str, mesh: str) -> None:
    """Loss, gradient norm, moments and parameters, with dropout, after every one of the first steps."""
    _, first, expected = trained(family, "1")
    _, other_first, found = trained(family, mesh)
    assert distance(other_first.params, first.params) == 0
    for (state, metrics), (wanted_state, wanted) in zip(found, expected, strict=True):
        for name, value in wanted.items():
            assert abs(metrics[name] - value) <= TOLERANCE * max(1, abs(value)), name
        for tree, wanted_tree in ((state.params, wanted_state.params), (state.opt_state, wanted_state.opt_state)):
            assert relative_error(tree, wanted_tree) <= TOLERANCE
            assert distance(tree, wanted_tree) <= LEAF_TOLERANCE
        assert int(state.step) == int(wanted_state.step)
    assert distance(found[-1][0].params, first.params) > 1e-2, "control: the parameters moved"
    for (_, metrics), (_, after) in itertools.pairwise(found):
        assert abs(metrics["loss"] - after["loss"]) > 1e-3, "control: another step, another loss"


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_split_over_fsdp(family: str) -> None:
    trainer, _, _ = trained(family, "4x2")
    encoder = next(iter(trainer.state.params.values()))
    kernel = encoder["layers"]["intermediate"]["kernel"]
    assert kernel.sharding.spec == P(None, "fsdp", None)
    assert kernel.addressable_shards[0].data.shape == (2, 8, 32)
    assert encoder["layers"]["intermediate"]["bias"].sharding.is_fully_replicated


@pytest.mark.parametrize("family", FAMILIES)
def test_in_batch_negatives_span_all_devices(family: str) -> None:
    """The loss over eight devices is that of the whole batch, not the mean of its halves' losses."""
    trainer, first, _ = trained(family, "8x1")
    evaluate = make_eval_step(trainer.objective, first.params)
    whole = float(evaluate(first.params, trainer.batch(0)).loss)
    one = make_objective(FAMILIES[family], mesh_of("1"))
    evaluate_one = jax.jit(lambda params, batch: one(params, batch, jax.random.key(0), train=False).loss)
    assert abs(whole - float(evaluate_one(first.params, make_batch(QUERIES, GROUP, 0)))) <= TOLERANCE * whole
    halves = [float(evaluate_one(first.params, half(make_batch(QUERIES, GROUP, 0), part))) for part in (0, 1)]
    assert abs(whole - np.mean(halves)) > 0.05, "control: only half of the documents as negatives"


def half(batch: Batch, part: int) -> Batch:
    """One half of a batch, as a device that sees no other would have it."""

    def rows(tree: Any, size: int) -> Any:
        return jax.tree.map(lambda x: x[part * size : (part + 1) * size], tree)

    B, N = QUERIES // 2, QUERIES * GROUP // 2
    queries: Tokens = rows(batch.queries, B)
    return Batch(
        queries,
        rows(batch.documents, N),
        rows(batch.positives, B) - part * N,
        rows(batch.document_ids, N),
        rows(batch.known_positives, B),
    )


def test_the_first_update_has_learning_rate_zero() -> None:
    _, first, history = trained("dual_encoder", "1")
    state, metrics = history[0]
    assert distance(state.params, first.params) == 0
    assert metrics["gradient_norm"] > 0.01
    assert int(state.step) == 1
    assert bool(state.healthy)
    assert distance(history[1][0].params, first.params) > 1e-3, "control: the second update moves"


def test_one_program_for_each_shape() -> None:
    trainer, _, _ = trained("dual_encoder", "8x1")
    state = jax.tree.map(lambda x: x.copy(), trainer.state)
    assert trainer.step.count == 1, "all steps so far were one program"
    state, _ = trainer.step(state, trainer.batch(50))
    assert trainer.step.count == 1
    trainer.step(state, shard_batch(trainer.mesh, make_batch(QUERIES, 1, 50)))
    assert trainer.step.count == 2


def poison(state: TrainState, value: float) -> TrainState:
    """The state with one weight that is not finite."""
    params = jax.tree.map(lambda x: x.copy(), state.params)
    name = "query_encoder"
    scale = params[name]["embeddings"]["norm"]["scale"]
    params[name]["embeddings"]["norm"]["scale"] = jax.device_put(scale.at[0].set(value), scale.sharding)
    rest = jax.tree.map(lambda x: x.copy(), (state.opt_state, state.step, state.healthy))
    return TrainState(params, *rest)


@pytest.mark.parametrize("mesh", ["1", "8x1"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_changes_nothing(mesh: str, value: float) -> None:
    trainer, _, _ = trained("dual_encoder", mesh)
    bad = poison(trainer.state, value)
    before = host(bad)
    bad, metrics = trainer.step(bad, trainer.batch(0))
    after = host(bad)
    assert not np.isfinite(float(metrics["loss"]))
    assert not after.healthy
    assert int(after.step) == int(before.step) == STEPS
    for kept, was in zip(
        jax.tree.leaves((after.params, after.opt_state)), jax.tree.leaves((before.params, before.opt_state))
    ):
        np.testing.assert_array_equal(kept, was)


def test_an_unhealthy_state_stays_as_it_is_even_on_sound_batches() -> None:
    trainer, _, _ = trained("dual_encoder", "1")
    copy = jax.tree.map(lambda x: x.copy(), trainer.state)
    state = copy.replace(healthy=jnp.array(False))
    before = host(state)
    for seed in range(2):
        state, metrics = trainer.step(state, trainer.batch(seed))
        assert np.isfinite(float(metrics["loss"]))
    after = host(state)
    assert not after.healthy
    assert int(after.step) == STEPS
    for kept, was in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(kept, was)
    control, _ = trainer.step(jax.tree.map(lambda x: x.copy(), trainer.state), trainer.batch(0))
    assert int(control.step) == STEPS + 1
    assert distance(host(control.params), before.params) > 1e-4, "control: a healthy state moves"


def test_evaluation_has_no_dropout_and_pools_as_at_inference() -> None:
    """Self-contrastive: at inference a document has its first vector alone, so its local loss is 0."""
    trainer, first, history = trained("self_contrastive", "1")
    evaluate = make_eval_step(trainer.objective, first.params)
    one, again = (evaluate(first.params, trainer.batch(0)) for _ in range(2))
    assert float(one.loss) == float(again.loss)
    assert float(one.terms["local"]) == 0.0
    assert history[0][1]["local_loss"] > 0.01
    assert evaluate.count == 1
