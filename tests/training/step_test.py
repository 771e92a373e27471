"""One training step: the same on one device and on eight, correct at step 0, and without an update if a value is not
finite."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.plan.hlo import collectives, parse_hlo
from jaxret.training.optimizers import make_optimizer
from jaxret.training.starting_weights import init_state
from jaxret.training.step import loss_and_gradients, make_eval_step, make_train_step, unchanged_state
from jaxret.training.tasks.retrieval import RetrievalObjective
from jaxret.training.train_state import PLAIN_RULE, TrainState, UpdateRule
from jaxret.types import Batch, Tokens
from tests.tiny import (
    BERT,
    DUAL_ENCODER,
    OPTIMIZER,
    SELF_CONTRASTIVE,
    WITHOUT_DROPOUT,
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
TOLERANCE = 1e-6  # relative error of all parameters or moments: devices change the order of a sum
LEAF_TOLERANCE = 1e-5  # relative error of a single array


def mesh_of(name: str) -> Any:
    devices, fsdp = MESHES[name]
    return make_mesh(fsdp, jax.devices()[:devices])


class Trainer:
    """A step and the state that it begins with, on one of the meshes."""

    def __init__(self, family: str, mesh: str, rule: UpdateRule = PLAIN_RULE, encoder: BertConfig = BERT) -> None:
        config = make_config(FAMILIES[family] | OPTIMIZER)
        self.mesh = mesh_of(mesh)
        self.objective = make_objective(FAMILIES[family], self.mesh, encoder)
        self.optimizer, _ = make_optimizer(config.optimizer, total_steps=10)
        pretrained = jax.tree.map(np.array, make_params(make_retriever({"encoder.tied": True}, encoder))["encoder"])
        config.optimizer.ema, config.train.skip_nonfinite = rule.ema, rule.skip_nonfinite
        self.state = init_state(config, self.mesh, self.objective.model, pretrained, self.optimizer)
        self.step = make_train_step(self.objective, self.optimizer, self.state, jax.random.key(9), rule)

    def batch(self, seed: int) -> Batch:
        return shard_batch(self.mesh, make_batch(QUERIES, GROUP, seed))

    def run(self, steps: int) -> list[tuple[TrainState, dict[str, float]]]:
        """Return host copies of every state, and the metrics; the step donates the memory of the old state."""
        history = []
        for seed in range(steps):
            self.state, metrics = self.step(self.state, self.batch(seed))
            history.append((host(self.state), jax.tree.map(float, metrics)))
        return history


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x), tree)


@functools.cache
def trained(family: str, mesh: str) -> tuple[Trainer, Any, list[tuple[TrainState, dict[str, float]]]]:
    """(trainer, its first state, the results of its first steps)."""
    trainer = Trainer(family, mesh)
    first = host(trainer.state)
    return trainer, first, trainer.run(STEPS)


@pytest.mark.daily("dual_encoder-4x2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("dual_encoder", "8x1"),
        pytest.param("dual_encoder", "4x2", marks=pytest.mark.exhaustive),
        pytest.param("self_contrastive", "8x1", marks=pytest.mark.exhaustive),
        pytest.param("self_contrastive", "4x2", marks=pytest.mark.exhaustive),
    ],
)
def test_eight_devices_equal_one(family: str, mesh: str) -> None:
    """Loss, gradient norm, moments and parameters, with dropout, after every one of the first steps."""
    _, first, expected = trained(family, "1")
    _, other_first, history = trained(family, mesh)
    assert distance(other_first.params, first.params) == 0
    for (state, metrics), (expected_state, expected_metrics) in zip(history, expected, strict=True):
        for name, value in expected_metrics.items():
            assert abs(metrics[name] - value) <= TOLERANCE * max(1, abs(value)), name
        for tree, expected_tree in (
            (state.params, expected_state.params),
            (state.opt_state, expected_state.opt_state),
        ):
            assert relative_error(tree, expected_tree) <= TOLERANCE
            assert distance(tree, expected_tree) <= LEAF_TOLERANCE
        assert int(state.step) == int(expected_state.step)
    assert distance(history[-1][0].params, first.params) > 1e-2, "control: the parameters changed"
    for (_, metrics), (_, after) in itertools.pairwise(history):
        assert abs(metrics["loss"] - after["loss"]) > 1e-3, "control: another step has another loss"


@pytest.mark.daily("dual_encoder")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["dual_encoder", pytest.param("self_contrastive", marks=pytest.mark.exhaustive)])
def test_parameters_are_split_over_fsdp(family: str) -> None:
    trainer, _, _ = trained(family, "4x2")
    encoder = next(iter(trainer.state.params.values()))
    kernel = encoder["layers"]["intermediate"]["kernel"]
    assert kernel.sharding.spec == P(None, "fsdp", None)
    assert kernel.addressable_shards[0].data.shape == (2, 8, 32)
    assert encoder["layers"]["intermediate"]["bias"].sharding.is_fully_replicated


@pytest.mark.daily("dual_encoder")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["dual_encoder", pytest.param("self_contrastive", marks=pytest.mark.exhaustive)])
def test_in_batch_negatives_span_all_devices(family: str) -> None:
    """The loss over eight devices is that of the whole batch, not the mean of the losses of its halves."""
    trainer, first, _ = trained(family, "4x2")  # the tests above have compiled this pair
    evaluate = make_eval_step(trainer.objective, first.params)
    whole = float(evaluate(first.params, trainer.batch(0)).loss)
    one = make_objective(FAMILIES[family], mesh_of("1"))
    evaluate_one = jax.jit(lambda params, batch: one(params, batch, jax.random.key(0), train=False).loss)
    assert abs(whole - float(evaluate_one(first.params, make_batch(QUERIES, GROUP, 0)))) <= TOLERANCE * whole
    halves = [float(evaluate_one(first.params, half(make_batch(QUERIES, GROUP, 0), part))) for part in (0, 1)]
    assert abs(whole - np.mean(halves)) > 0.05, "control: with the negatives of half a batch, the loss differs"


def half(batch: Batch, part: int) -> Batch:
    """Return one half of a batch, as on a device that sees no other."""

    def rows(tree: Any, size: int) -> Any:
        return jax.tree.map(lambda x: x[part * size : (part + 1) * size], tree)

    B, N = QUERIES // 2, QUERIES * GROUP // 2
    queries: Tokens = rows(batch.queries, B)
    return Batch(
        queries,
        rows(batch.passages, N),
        rows(batch.positives, B) - part * N,
        rows(batch.passage_ids, N),
        rows(batch.known_positives, B),
    )


@pytest.mark.slow
def test_the_first_update_has_learning_rate_zero() -> None:
    _, first, history = trained("dual_encoder", "1")
    state, metrics = history[0]
    assert distance(state.params, first.params) == 0
    assert metrics["gradient_norm"] > 0.01
    assert int(state.step) == 1
    assert bool(state.healthy)
    assert distance(history[1][0].params, first.params) > 1e-3, "control: the second update changes the parameters"


def test_every_step_has_its_own_dropout_masks() -> None:
    """The first update has a learning rate of 0, so both states have the same parameters; only the step differs."""
    trainer, first, history = trained("dual_encoder", "1")
    after = history[0][0]
    losses = [
        float(trainer.step(jax.tree.map(jnp.array, state), trainer.batch(0))[1]["loss"])
        for state in (first, after, replace(after, step=first.step))
    ]
    assert abs(losses[1] - losses[0]) > 1e-3
    assert losses[2] == losses[0], "control: the same step has the same masks"


def test_queries_and_passages_have_their_own_dropout_masks() -> None:
    """The encoder is shared, and each passage is the text of its query, in the same row."""
    objective = make_objective(DUAL_ENCODER | {"encoder.tied": True}, mesh_of("1"))
    batch = make_batch(QUERIES, 1)
    batch = replace(batch, passages=batch.queries)
    params = make_params(objective.model)
    encode = jax.jit(lambda train: objective.encode(params, batch, jax.random.key(0), train), static_argnums=0)
    queries, passages = encode(True)
    assert float(jnp.abs(queries.vectors - passages.vectors).max(axis=(1, 2)).min()) > 1e-2
    queries, passages = encode(False)
    np.testing.assert_allclose(
        queries.vectors, passages.vectors, atol=1e-6, err_msg="control: without dropout, they are equal"
    )


@pytest.mark.slow
def test_one_program_for_each_shape() -> None:
    trainer, _, _ = trained("dual_encoder", "8x1")
    state = jax.tree.map(lambda x: x.copy(), trainer.state)
    assert trainer.step.count == 1, "all steps used one program"
    state, _ = trainer.step(state, trainer.batch(50))
    assert trainer.step.count == 1
    trainer.step(state, shard_batch(trainer.mesh, make_batch(QUERIES, 1, 50)))
    assert trainer.step.count == 2


def poison(state: TrainState, value: float) -> TrainState:
    """Return the state with one weight that is not finite."""
    params = jax.tree.map(lambda x: x.copy(), state.params)
    name = "query_encoder"
    scale = params[name]["embeddings"]["norm"]["scale"]
    params[name]["embeddings"]["norm"]["scale"] = jax.device_put(scale.at[0].set(value), scale.sharding)
    return replace(jax.tree.map(lambda x: x.copy(), state), params=params)


@pytest.mark.parametrize("mesh", ["1", "4x2"])  # test_eight_devices_equal_one has compiled them
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nonfinite_step_changes_nothing(mesh: str, value: float) -> None:
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


def test_an_update_that_is_not_finite_is_not_made() -> None:
    """Loss and gradient are finite, but a moment of the optimizer is not."""
    trainer, _, _ = trained("dual_encoder", "1")
    state = jax.tree.map(lambda x: x.copy(), trainer.state)
    moments = jax.tree.map(lambda x: x * np.inf if x.dtype == jnp.float32 else x, state.opt_state)
    before = host(state)
    after, metrics = trainer.step(replace(state, opt_state=moments), trainer.batch(0))
    assert np.isfinite([float(metrics[name]) for name in ("loss", "gradient_norm")]).all()
    assert not after.healthy
    jax.tree.map(np.testing.assert_array_equal, host(after.params), before.params)


def test_an_unhealthy_state_stays_unchanged() -> None:
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
    assert distance(host(control.params), before.params) > 1e-4, "control: a finite state is updated"


def test_as_many_updates_are_skipped_as_the_rule_allows() -> None:
    state = TrainState({}, (), jnp.int32(7), jnp.array(True), skip_count=jnp.int32(0))
    history = []
    for _ in range(4):
        state = unchanged_state(state, UpdateRule(skip_nonfinite=2))
        assert state.skip_count is not None
        history.append((int(state.skip_count), int(state.step), bool(state.healthy)))
    assert history == [(1, 8, True), (2, 9, True), (2, 9, False), (2, 9, False)]


@pytest.mark.slow
def test_a_skipped_step_changes_only_the_count() -> None:
    """Two steps are skipped; in the third, the state is no longer healthy and does not change."""
    trainer = Trainer("dual_encoder", "1", UpdateRule(ema=0.5, skip_nonfinite=2))
    trainer.run(2)
    state = poison(trainer.state, np.inf)
    before = host(state)
    for skipped, step, healthy in ((1, 3, True), (2, 4, True), (2, 4, False), (2, 4, False)):
        state, metrics = trainer.step(state, trainer.batch(0))
        after = host(state)
        assert not np.isfinite(float(metrics["loss"]))
        assert (int(after.skip_count), int(after.step), bool(after.healthy)) == (skipped, step, healthy)
        for name in ("params", "opt_state", "ema"):
            jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))


@pytest.mark.exhaustive
def test_finite_steps_are_not_affected_by_the_rule() -> None:
    trainer = Trainer("dual_encoder", "8x1", UpdateRule(skip_nonfinite=2))
    (_, _, plain), history = trained("dual_encoder", "8x1"), trainer.run(STEPS)
    state, expected = history[-1][0], plain[-1][0]
    assert state.skip_count == 0
    assert (int(state.step), bool(state.healthy)) == (STEPS, True)
    for tree, other in ((state.params, expected.params), (state.opt_state, expected.opt_state)):
        assert relative_error(tree, other) <= TOLERANCE


@pytest.mark.daily("1")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", pytest.param("4x2", marks=pytest.mark.exhaustive)])
def test_the_moving_average(mesh: str) -> None:
    """It follows the formula in float64 from the first weights on, and has no effect on training."""
    trainer = Trainer("dual_encoder", mesh, UpdateRule(ema=0.7))
    first, history = host(trainer.state), trainer.run(STEPS)
    jax.tree.map(np.testing.assert_array_equal, first.ema, first.params)
    weights = [first.params, *(state.params for state, _ in history)]
    for decay, close in ((0.7, True), (0.8, False)):  # control: another decay
        expected = jax.tree.map(lambda x: x.astype(np.float64), weights[0])
        for later in weights[1:]:
            expected = jax.tree.map(lambda e, w, d=decay: d * e + (1 - d) * w, expected, later)
        assert (relative_error(history[-1][0].ema, expected) <= 1e-7) is close
    _, _, without = trained("dual_encoder", mesh)
    assert relative_error(history[-1][0].params, without[-1][0].params) <= TOLERANCE
    kernels = [
        w["query_encoder"]["layers"]["intermediate"]["kernel"] for w in (trainer.state.weights, trainer.state.params)
    ]
    assert kernels[0].sharding == kernels[1].sharding
    assert trainer.state.weights is trainer.state.ema


@pytest.mark.exhaustive
def test_the_moving_average_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    trainer = Trainer("dual_encoder", "1", UpdateRule(ema=0.7))
    weights = host(trainer.state).params["query_encoder"]["layers"]["intermediate"]["kernel"]
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data = torch.tensor(weights)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
    averaged.update_parameters(model)  # the first call copies
    for state, _ in trainer.run(STEPS):
        model.weight.data = torch.tensor(state.params["query_encoder"]["layers"]["intermediate"]["kernel"])
        averaged.update_parameters(model)
    average = trainer.state.weights["query_encoder"]["layers"]["intermediate"]["kernel"]
    np.testing.assert_allclose(average, averaged.module.weight.detach().numpy(), rtol=1e-5, atol=1e-7)


COUNT = 3
ONE_LAYER = replace(WITHOUT_DROPOUT, num_layers=1)  # a program with one layer compiles in a third of the time


def stacked(*seeds: int) -> Batch:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(make_batch(QUERIES, GROUP, seed) for seed in seeds))


@functools.cache
def gradient_program(mesh: str, family: str, count: int) -> tuple[RetrievalObjective, Any, Any]:
    """(objective, parameters, compiled loss and gradients) of several batches. The tied family uses chunks, if there
    are several batches; the other one needs a single layer, because layers do not matter here."""
    encoder = BERT if family == "self_contrastive" else replace(BERT, num_layers=1)
    chunk_size = QUERIES // 2 if count > 1 and family == "self_contrastive" else 0
    objective, key = make_objective(FAMILIES[family], mesh_of(mesh), encoder, chunk_size), jax.random.key(9)
    program = jax.jit(lambda p, b, n: loss_and_gradients(objective, p, b, key, n, count))
    return objective, make_params(objective.model), program


def gradients_of(mesh: str, family: str, batch: Batch, number: int, count: int) -> tuple[Any, Any]:
    objective, params, program = gradient_program(mesh, family, count)
    return host(program(params, shard_batch(objective.mesh, batch, stacked=count > 1), number))


@functools.cache
def separately(family: str) -> tuple[Any, Any]:
    """Loss and gradients of the batches 6, 7 and 8, one at a time on one device, and their means in float64."""
    separate = [gradients_of("1", family, make_batch(QUERIES, GROUP, seed), 6 + seed, 1) for seed in range(COUNT)]
    return jax.tree.map(lambda *leaves: np.mean([np.asarray(x, np.float64) for x in leaves], axis=0), *separate)


@pytest.mark.daily("dual_encoder-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(*case, marks=[] if case == ("dual_encoder", "1") else pytest.mark.exhaustive)
        for case in itertools.product(FAMILIES, MESHES)
    ],
)
def test_an_accumulated_gradient_equals_the_mean_of_its_batches(family: str, mesh: str) -> None:
    """Dropout is on: each batch has the masks of a separate step."""
    terms, gradients = gradients_of(mesh, family, stacked(0, 1, 2), 2, COUNT)
    expected_terms, expected = separately(family)
    assert float(terms.loss) == pytest.approx(float(expected_terms.loss), rel=TOLERANCE)
    assert float(terms.rank) == pytest.approx(float(expected_terms.rank), rel=TOLERANCE)
    assert relative_error(gradients, expected) <= TOLERANCE
    assert distance(gradients, expected) <= LEAF_TOLERANCE
    if (family, mesh) == ("dual_encoder", "1"):
        for other, step in ((stacked(0, 1, 1), 2), (stacked(0, 1, 2), 3)):
            _, control = gradients_of(mesh, family, other, step, COUNT)
            assert relative_error(control, expected) > 1e-2, (
                "control: other batches or dropout masks give another gradient"
            )


@pytest.mark.exhaustive
def test_accumulated_batches_share_no_negatives() -> None:
    """A single batch of all their queries has another loss."""
    objective = make_objective(DUAL_ENCODER, mesh_of("1"), WITHOUT_DROPOUT)
    params, key = make_params(objective.model), jax.random.key(0)
    loss = jax.jit(lambda batch: objective(params, batch, key).loss)
    halves = [half(make_batch(QUERIES, GROUP), part) for part in (0, 1)]
    apart = np.mean([float(loss(batch)) for batch in halves])
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *halves)
    terms, _ = jax.jit(lambda batch: loss_and_gradients(objective, params, batch, key, jnp.int32(0), 2))(stack)
    assert float(terms.loss) == pytest.approx(apart, rel=1e-5)
    assert abs(float(loss(make_batch(QUERIES, GROUP))) - apart) > 0.05, "control: the loss of the whole batch differs"


@pytest.mark.daily("8x1")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8x1", pytest.param("4x2", marks=pytest.mark.exhaustive)])
def test_gradients_of_several_batches_are_sent_once(mesh: str) -> None:
    """Another batch adds collectives of its passages' vectors and their gradients, but none of parameters."""
    moved = []
    for count in (2, 4):
        trainer = Trainer("dual_encoder", mesh, UpdateRule(accumulate=count), ONE_LAYER)
        batch = shard_batch(trainer.mesh, stacked(*range(count)), stacked=True)
        program = trainer.step.trace(trainer.state, batch).lower().compile()
        moved.append(sum(c.times * c.bytes for c in collectives(parse_hlo(program.as_text()), 8)))
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(trainer.state.params))
    vectors = QUERIES * GROUP * 16 * 4
    assert moved[0] >= parameters, "control: gradients are counted"
    assert moved[1] - moved[0] <= 2 * (2 * vectors + 1000) < parameters / 4


def test_evaluation_has_no_dropout_and_pools_as_at_inference() -> None:
    """Self-contrastive: in evaluation, a passage has only its first vector, so its local loss is 0."""
    objective, batch = make_objective(SELF_CONTRASTIVE, mesh_of("1")), make_batch(QUERIES, GROUP)
    params = make_params(objective.model)
    evaluate = make_eval_step(objective, params)
    one, again = (evaluate(params, batch) for _ in range(2))
    assert float(one.loss) == float(again.loss)
    assert float(one.terms["local"]) == 0.0
    training = jax.jit(lambda params, batch: objective(params, batch, jax.random.key(0)).terms["local"])
    assert float(training(params, batch)) > 0.01, "control: in training, it has several"
    assert evaluate.count == 1
