"""The attention kernel for TPUs, run on a CPU: its values, gradients and dropout equal those of plain attention."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders import flash
from jaxret.models.encoders.attention import attend
from jaxret.models.encoders.flash import block_rows, heads_at_a_time, threefry
from jaxret.models.encoders.fused import fused_attention
from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.window import FAR, WindowMask
from jaxret.parallel.mesh import make_mesh, row_sharding, shardings
from jaxret.runs.embedder import Embedder
from tests import tiny

HEADS, WIDTH = 4, 8
FLASH = Compute(attention="flash", interpret=True)


def dropout(rate: float, rows: int | None) -> Dropout:
    """A bound dropout module for texts of one token. rows: how many texts; None: outside of training."""
    layout = TokenLayout(jnp.ones((rows or 1, 1), bool), None if rows is None else jnp.arange(rows))
    return Dropout(rate, layout).bind({}, rngs={"dropout": jax.random.key(1)})


def value_and_gradients(
    compute: Compute,
    dtype: Any,
    length: int,
    mask: jax.Array | WindowMask,
    rate: float,
    heads: tuple[int, int] = (HEADS, HEADS),
) -> Any:
    """Return a weighted sum of attention's output, its gradients, and the output. heads: of queries, and of keys."""
    random = np.random.default_rng(0)
    rows = len(mask.keys if isinstance(mask, WindowMask) else mask)
    shapes = [(rows, length, heads[n], WIDTH) for n in (0, 1, 1)]
    inputs = tuple(jnp.asarray(2 * random.normal(size=shape), dtype) for shape in shapes)
    weights = jnp.asarray(random.normal(size=(rows, length, heads[0] * WIDTH)), jnp.float32)

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = attend(query, key, value, mask, dropout(rate, rows), compute=compute)
        return jnp.sum(mixed.astype(jnp.float32) * weights), mixed

    gradients, mixed = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*inputs)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), (mixed, gradients))


def lengths_mask(length: int, *lengths: int) -> jax.Array:
    return jnp.arange(length) < jnp.array(lengths)[:, None]


@pytest.mark.table
@pytest.mark.parametrize(
    ("dtype", "length", "rate", "tolerance"),
    [
        pytest.param(jnp.float32, 20, 0.0, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param(jnp.float32, 20, 0.3, 1e-5, marks=pytest.mark.exhaustive),
        (jnp.bfloat16, 20, 0.3, 2**-7),
        (jnp.float32, 70, 0.3, 1e-5),  # several blocks of queries, padded
    ],
)
def test_flash_equals_plain_attention(
    dtype: Any, length: int, rate: float, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are equal, with padding, a text of nothing but padding, and dropout of weights."""
    monkeypatch.setattr(flash, "QUERY_BLOCK", 64)
    mask = lengths_mask(length, length, 7, 1, 0)
    actual = value_and_gradients(FLASH, dtype, length, mask, rate)
    expected = value_and_gradients(Compute(), dtype, length, mask, rate)
    assert tiny.distance(actual, expected) <= tolerance
    for wrong, other in ((jnp.ones_like(mask), rate), (mask, rate + 0.1)):
        control = value_and_gradients(FLASH, dtype, length, wrong, other)
        assert tiny.distance(control, expected) > 20 * tolerance, (
            "control: another mask or dropout rate gives another result"
        )


@pytest.mark.daily("window2-heads2-3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "heads", "leading"),
    [
        ((FAR, 0), (8, 2), 1),  # a decoder whose heads share keys
        pytest.param((5, 0), (4, 4), 1, marks=pytest.mark.exhaustive),
        ((9, 9), (4, 4), 3),  # an encoder with windows whose first tokens have one position
        pytest.param((FAR, FAR), (6, 2), 1, marks=pytest.mark.exhaustive),
    ],
)
def test_windows_and_shared_keys_equal_plain_attention(
    window: tuple[int, int], heads: tuple[int, int], leading: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, with several blocks of queries, padding on either side, and dropout."""
    monkeypatch.setattr(flash, "QUERY_BLOCK", 64)
    length = 70
    keys = lengths_mask(length, length, 7).at[1].set(jnp.arange(length) >= 60)
    positions = jnp.maximum(jnp.arange(length) - (leading - 1), 0)

    def windowed(backward: int, forward: int) -> WindowMask:
        return WindowMask(keys, positions, jnp.int32(backward), jnp.int32(forward), ((backward, forward),))

    actual = value_and_gradients(FLASH, jnp.float32, length, windowed(*window), 0.3, heads)
    expected = value_and_gradients(Compute(), jnp.float32, length, windowed(*window), 0.3, heads)
    assert tiny.distance(actual, expected) <= 1e-5
    nearer = value_and_gradients(FLASH, jnp.float32, length, windowed(4, 0), 0.3, heads)
    assert tiny.distance(nearer, expected) > 1e-3, "control: another window gives another result"


def test_random_bits_equal_those_of_jax() -> None:
    keys = jax.random.split(jax.random.key(3), 5)
    raw = jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
    drawn = jax.vmap(lambda key: jax.random.bits(key, (3, 7)))(keys)
    place = jnp.arange(21, dtype=jnp.int32).reshape(3, 7)
    bits = jax.vmap(lambda key: threefry(key[0], key[1], place))(raw)
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(bits, jnp.uint32), drawn)


def test_blocks() -> None:
    assert [heads_at_a_time(*shape) for shape in ((12, 64), (12, 32), (16, 64), (8, 128), (6, 96), (2, 8))] == [
        *(2, 4, 2, 1, 6, 2)
    ]
    assert [block_rows(n, n) for n in (5, 200, 256, 320, 512, 2048, 8192)] == [5, 200, 256, 160, 256, 128, 64]


def gradient(
    overrides: dict[str, Any], attention: str, devices: int, fsdp: int, encoder: Any = tiny.BERT
) -> tuple[float, Any]:
    mesh = make_mesh(fsdp, jax.devices()[:devices])
    encoder = dataclasses.replace(encoder, num_layers=3)
    objective = tiny.make_objective(overrides, mesh, encoder)
    module = objective.model.module
    compute = dataclasses.replace(module.compute, attention=attention, interpret=True)
    retriever = dataclasses.replace(objective.model, module=module.clone(compute=compute))
    objective = dataclasses.replace(objective, model=retriever)
    params = tiny.make_params(objective.model)
    params = jax.device_put(params, shardings(mesh, params))
    batch = jax.device_put(tiny.make_batch(8, pseudo_queries="pseudo" in str(overrides)), row_sharding(mesh))
    loss = jax.value_and_grad(lambda p, b: objective(p, b, jax.random.key(3)).loss)
    return jax.device_get(jax.jit(loss)(params, batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "devices", "fsdp", "recompute"),
    [
        pytest.param(tiny.DUAL_ENCODER | {"encoder.tied": True}, 2, 2, "none", id="tied"),
        pytest.param(tiny.DUAL_ENCODER, 8, 4, "cheap", id="dual_encoder"),
        pytest.param(tiny.MVR, 8, 1, "none", id="mvr"),
        pytest.param(tiny.I3, 8, 1, "layer", id="i3"),
    ],
)
def test_a_step_on_several_devices(
    family: dict[str, Any], devices: int, fsdp: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, in the scan, in its recomputation and in the shard_map, the step equals that of plain attention.

    JAX's check of the types that vary over devices is off, because its interpreter of kernels does not support it.
    Without the check, gradients differ from those on one device. Compiled kernels are checked in tests/plan.
    """
    one, _ = gradient(family, "plain", 1, 1)
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    overrides = family | {"encoder.recompute": recompute}
    value, expected = gradient(overrides, "plain", devices, fsdp)
    actual_value, actual = gradient(overrides, "flash", devices, fsdp)
    assert abs(actual_value - one) <= 2e-6 * max(abs(one), 1)
    assert abs(actual_value - value) <= 2e-6 * max(abs(value), 1)
    assert tiny.relative_error(actual, expected) <= 2e-6
    other, _ = gradient(overrides | {"encoder.dtype": "bfloat16"}, "flash", devices, fsdp)
    assert abs(other - value) > 1e-5, "control: bfloat16 gives another loss"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "encoder"),
    [
        (tiny.DUAL_ENCODER | {"head.token": "last"}, tiny.LLAMA),
        (tiny.DUAL_ENCODER | {"head.token": "mean"}, dataclasses.replace(tiny.GEMMA, causal=False)),
        (tiny.MVR, tiny.MODERNBERT),  # MVR's viewers share a position
    ],
    ids=["llama", "gemma", "modernbert"],
)
def test_a_step_of_encoders_with_windows(family: dict[str, Any], encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    value, expected = gradient(family, "plain", 2, 1, encoder)
    actual_value, actual = gradient(family, "flash", 2, 1, encoder)
    assert abs(actual_value - value) <= 2e-6 * max(abs(value), 1)
    assert tiny.relative_error(actual, expected) <= 2e-6


def test_encoding_and_validation_run_on_several_tpus() -> None:
    """XLA does not split a kernel over devices, so a kernel outside of a shard_map cannot be lowered."""
    retriever = tiny.make_retriever({"encoder.attention": "flash"})
    params, tokens = jax.eval_shape(retriever.init, jax.random.key(0)), tiny.make_tokens(8, 8)
    embedder = Embedder(retriever, params, make_mesh(), 0, {"passage": 8}, 64)
    for program in (embedder.program("passage"), tiny.ranking(embedder)):
        lowered = program.trace(params, tokens).lower(lowering_platforms=("tpu",))
        assert "tpu_custom_call" in lowered.as_text()


def test_cudnn_drops_no_weights() -> None:
    query = jnp.zeros((2, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"'cudnn', .*attention weights"):
        fused_attention(
            query, query, query, jnp.ones((2, 4), bool), dropout(0.1, 2), Compute(jnp.bfloat16, attention="cudnn")
        )


def test_kernels_have_no_mask_for_each_query_and_no_bias() -> None:
    query, mask, drop = jnp.zeros((1, 4, 2, 8)), jnp.ones((1, 4, 4), bool), dropout(0.1, None)
    for of, bias in ((mask, None), (mask[:, 0], jnp.zeros((2, 4, 4)))):
        with pytest.raises(ValueError, match=r"encoder\.attention='flash' .*mask .*query"):
            attend(query, query, query, of, drop, bias, FLASH)
