"""Attention over keys is computed in float32, whatever the compute type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxret.models.encoders.attention import attend, erf, gelu
from jaxret.models.encoders.layers import Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.parallel.mesh import make_mesh
from jaxret.types import Tokens

SHAPES = [(3, 4), (5, 2), (5, 2)]  # tokens and heads of query, key and value


class Factors(Dropout):
    """A dropout that multiplies the weights of each key by a factor that the test chooses."""

    factors: tuple[float, ...] = (1.0,)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.factors, x.dtype)


def test_the_softmax_is_float32_also_with_bfloat16() -> None:
    """Scores around 40 that differ by less than bfloat16 can tell apart there (0.25): their weights must differ."""
    keys = 16
    query = jnp.full((1, 1, 1, 16), 1.0, jnp.bfloat16)
    steps = jnp.asarray(np.linspace(0, 0.0625, keys), jnp.float32)
    key = jnp.full((1, keys, 1, 16), 2.5, jnp.float32).at[0, :, 0, 0].add(steps).astype(jnp.bfloat16)
    value = jnp.eye(keys, dtype=jnp.bfloat16)[None, :, None]
    mixed = np.asarray(attend(query, key, value, jnp.ones((1, keys), bool), lambda w: w), np.float32)[0, 0]
    scores = (np.asarray(query, np.float64)[0, 0, 0] * np.asarray(key, np.float64)[0, :, 0]).sum(axis=-1)
    expected = np.exp(scores - scores.max())
    expected /= expected.sum()
    assert len(np.unique(expected)) > 3
    np.testing.assert_allclose(mixed, expected, rtol=2**-7)  # the weights are rounded to bfloat16 after the softmax
    halved = np.asarray(jax.nn.softmax(jnp.asarray(scores, jnp.bfloat16)), np.float64)
    assert np.abs(halved / expected - 1).max() > 2**-6, "control: a softmax in bfloat16 has a larger error"


@pytest.mark.parametrize("training", [True, False])
def test_weights_are_dropped_after_the_softmax(training: bool) -> None:
    """The remaining weights keep their share of the whole sum; several heads may share a key. The oracle is float64."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((2, n, heads, 4)).astype(np.float32) for n, heads in SHAPES)
    keep = np.array([1.0, 0.0, 2.0, 1.0, 0.0], np.float32)
    mask = np.array([[True] * 5, [True] * 3 + [False] * 2])
    layout = TokenLayout.of(Tokens(jnp.zeros((2, 5), jnp.int32), jnp.asarray(mask)), train=training)
    on_device = [jnp.asarray(x) for x in (query, key, value)]
    result = attend(
        on_device[0], on_device[1], on_device[2], jnp.asarray(mask), Factors(0.5, layout, factors=tuple(keep))
    )
    wide_key, wide_value = (np.repeat(x.astype(np.float64), 2, axis=2) for x in (key, value))
    scores = np.where(mask[:, None, None], np.einsum("bqhw,bkhw->bhqk", query, wide_key), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True) * keep
    expected = np.einsum("bhqk,bkhw->bqhw", weights, wide_value).reshape(2, 3, 16)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_bfloat16_loses_no_more_where_the_division_comes_last() -> None:
    """Outside of training, weights are rounded before they are divided by their sum. Errors are root mean squares
    against float64, over 512 queries."""
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal((4, 128, 4, 32)), jnp.bfloat16) for _ in range(3)]
    query, key, value = (np.asarray(x, np.float64) for x in arrays)
    mask = jnp.ones((4, 128), bool)
    scores = np.einsum("bqhw,bkhw->bhqk", query, key)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = np.einsum("bhqk,bkhw->bqhw", weights / weights.sum(axis=-1, keepdims=True), value).reshape(4, 128, -1)
    errors = []
    for training in (False, True):
        layout = TokenLayout.of(Tokens(jnp.zeros((4, 128), jnp.int32), mask), train=training)
        result = attend(arrays[0], arrays[1], arrays[2], mask, Factors(0.0, layout))
        errors.append(np.sqrt(np.mean((np.asarray(result, np.float64) - expected) ** 2)))
    assert errors[0] <= errors[1] < 2**-8


def test_the_derivative_of_erf_inside_shard_map() -> None:
    """It equals its formula, on one device and on eight; jax 0.12's own erf raises an error there
    (docs/upstream.md)."""
    x = jnp.linspace(-4, 4, 64)
    split = jax.jit(
        jax.shard_map(jax.grad(lambda x: gelu(x).sum()), mesh=make_mesh(), in_specs=P("data"), out_specs=P("data"))
    )
    np.testing.assert_array_equal(split(x), jax.jit(jax.grad(lambda x: gelu(x).sum()))(x))
    slope = jax.vmap(jax.grad(erf))(x)
    np.testing.assert_allclose(slope, 2 / np.sqrt(np.pi) * np.exp(-(np.asarray(x, np.float64) ** 2)), rtol=1e-5)
