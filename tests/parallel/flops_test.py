"""FLOPs counted from a traced step, against the closed form for a BERT, and against the products in XLA's program."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.parallel import flops
from jaxret.parallel.mesh import make_mesh, shardings
from jaxret.plan import hlo
from jaxret.training.optimizers import make_optimizer
from jaxret.training.step import make_train_step
from jaxret.training.train_state import TrainState
from tests.tiny import (
    AGGRETRIEVER,
    BERT,
    DUAL_ENCODER,
    I3,
    LATE_INTERACTION,
    MLR,
    MVR,
    make_batch,
    make_config,
    make_objective,
)

QUERIES, GROUP, QUERY_LENGTH, PASSAGE_LENGTH = 16, 2, 4, 6  # the shapes of make_batch
EXACT = "float32 exact"


def traced_step(overrides: dict[str, Any], devices: int = 1, chunk_size: int = 0) -> Any:
    mesh = make_mesh(1, jax.devices()[:devices])
    objective = make_objective(overrides, mesh, chunk_size=chunk_size)
    optimizer, _ = make_optimizer(make_config(overrides).optimizer, 100)

    def first(key: jax.Array) -> TrainState:
        params = objective.model.init(key)
        return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.array(True))

    state = jax.eval_shape(first, jax.random.key(0))
    places = shardings(mesh, state)
    state = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
    batch = make_batch(QUERIES, GROUP, pseudo_queries="pseudo_queries" in str(overrides))
    return make_train_step(objective, optimizer, state, jax.random.key(0)).trace(state, batch)


def layers(config: BertConfig, texts: int, length: int) -> int:
    """Return the FLOPs of the layers' forward pass: four square products, the feed-forward, and attention's two. In the
    last layer, only keys and values cover every token; the rest is for [CLS]."""
    hidden, wide = config.hidden_size, config.intermediate_size
    each = 8 * hidden**2 + 4 * hidden * wide + 4 * length * hidden
    keys_and_values = 4 * hidden**2
    last = length * keys_and_values + each - keys_and_values
    return texts * ((config.num_layers - 1) * length * each + last)


FORWARD = {"queries": layers(BERT, QUERIES, QUERY_LENGTH), "passages": layers(BERT, QUERIES * GROUP, PASSAGE_LENGTH)}
SCORES = 2 * QUERIES * QUERIES * GROUP * BERT.hidden_size


def by_phase(kinds: Counter[flops.ProductKind], part: str) -> dict[str, int]:
    return {kind.phase: number for kind, number in kinds.items() if kind.part == part}


@pytest.mark.table
@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_dual_encoder_equal_the_formula(tied: bool) -> None:
    actual = flops.count_flops(traced_step(DUAL_ENCODER | {"encoder.tied": tied}))
    for side, forward in FORWARD.items():
        assert by_phase(actual, side) == {"forward": forward, "backward": 2 * forward}
    assert by_phase(actual, "loss") == {"forward": SCORES, "backward": 2 * SCORES}
    assert not by_phase(actual, "head")
    assert {kind.precision for kind in actual} == {EXACT}


@pytest.mark.slow
def test_bfloat16_products_are_counted_separately() -> None:
    actual = flops.count_flops(traced_step(DUAL_ENCODER | {"encoder.dtype": "bfloat16"}))
    assert actual[flops.ProductKind("passages", "forward", "bfloat16")] == FORWARD["passages"]
    assert (
        actual[flops.ProductKind("loss", "forward", EXACT)] == SCORES
    )  # scores are float32, whatever the encoder's type


@pytest.mark.slow
def test_chunks_are_counted_twice() -> None:
    """With two chunks, the forward pass of every text is repeated, except for each text's last product, which no
    gradient needs."""
    actual = flops.count_flops(traced_step(DUAL_ENCODER, chunk_size=8))
    for side, forward in FORWARD.items():
        phases = by_phase(actual, side)
        assert phases["forward"] == forward
        assert phases["backward"] == 2 * forward
        assert 0.8 * forward < phases["recomputation"] <= forward


@pytest.mark.slow
def test_a_head_has_a_part_of_its_own() -> None:
    actual = flops.count_flops(traced_step(LATE_INTERACTION))
    projection = 2 * BERT.hidden_size * 6 * QUERIES * (QUERY_LENGTH + GROUP * PASSAGE_LENGTH)
    assert by_phase(actual, "head") == {"forward": projection, "backward": 2 * projection}


@pytest.mark.daily("late")
@pytest.mark.parametrize(
    ("overrides", "chunk_size"),
    [
        pytest.param(DUAL_ENCODER, 0, id="dual", marks=pytest.mark.exhaustive),
        pytest.param(DUAL_ENCODER, 8, id="chunks", marks=pytest.mark.exhaustive),
        pytest.param(MLR, 0, id="mlr", marks=pytest.mark.exhaustive),
        pytest.param(MVR, 0, id="mvr", marks=pytest.mark.exhaustive),
        pytest.param(LATE_INTERACTION, 0, id="late", marks=pytest.mark.exhaustive),
        pytest.param(AGGRETRIEVER, 0, id="aggretriever", marks=pytest.mark.exhaustive),
        pytest.param(I3, 0, id="i3", marks=pytest.mark.exhaustive),
    ],
)
def test_all_devices_together_compute_what_was_counted(overrides: dict[str, Any], chunk_size: int) -> None:
    """XLA's program for one of eight devices has an eighth of the products, for every family."""
    traced = traced_step(overrides, 8, chunk_size)
    compiled = hlo.parse_hlo(traced.lower().compile().as_text())
    assert 8 * hlo.hlo_product_flops(compiled) == pytest.approx(sum(flops.count_flops(traced).values()), rel=0.02)


def test_parallel_work_counts_on_every_device() -> None:
    mesh = make_mesh(2, jax.devices()[:4])
    rows = jax.sharding.PartitionSpec(("data", "fsdp"))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    mapped = jax.shard_map(product, mesh=mesh, in_specs=(rows, jax.sharding.PartitionSpec()), out_specs=rows)
    traced = jax.jit(mapped).trace(jnp.ones((8, 3)), jnp.ones((3, 5)))
    assert sum(flops.count_flops(traced).values()) == 2 * 8 * 3 * 5


def test_a_kernel_counts_at_every_step_of_its_grid() -> None:
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    rows, whole = pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 32), lambda i: (0, 0))
    call = pl.pallas_call(
        kernel,
        grid=(4,),
        in_specs=[rows, whole],
        out_specs=pl.BlockSpec((8, 32), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
    )
    traced = jax.jit(call).trace(jnp.ones((32, 16)), jnp.ones((16, 32)))
    assert sum(flops.count_flops(traced).values()) == 2 * 32 * 16 * 32


def test_the_longest_branch_counts() -> None:
    def either(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert sum(flops.count_flops(jax.jit(either).trace(jnp.ones((3, 3)))).values()) == 2 * 2 * 27


def test_cpu_implementations_do_not_count() -> None:
    def product(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=lambda y: y @ y @ y, default=lambda y: y.astype(jnp.bfloat16) @ y)

    ((kind, times),) = flops.count_flops(jax.jit(product).trace(jnp.ones((3, 3), jnp.bfloat16))).items()
    assert (times, kind.precision) == (2 * 27, "bfloat16")


def test_a_loop_of_unknown_length_is_an_error() -> None:
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y, x)

    with pytest.raises(NotImplementedError, match="unknown length"):
        flops.count_flops(jax.jit(until).trace(jnp.ones((3, 3))))


def test_an_optimizer_counts_element_wise_operations() -> None:
    def update(x: jax.Array) -> jax.Array:
        return jnp.sqrt(x * x + 1.0)

    assert flops.count_elementwise(update, jnp.ones(10)) == 30
