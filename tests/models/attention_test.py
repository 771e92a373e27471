"""Attention over keys: in float32 whatever the compute type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxret.models.encoders.attention import attend, erf, gelu
from jaxret.parallel.mesh import make_mesh


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
    assert np.abs(halved / expected - 1).max() > 2**-6, "control: a softmax in bfloat16"


def test_the_derivative_of_erf_inside_shard_map() -> None:
    """Equal to its formula, on one device and on eight; jax 0.12's own raises there (docs/upstream.md)."""
    x = jnp.linspace(-4, 4, 64)
    split = jax.jit(
        jax.shard_map(jax.grad(lambda x: gelu(x).sum()), mesh=make_mesh(), in_specs=P("data"), out_specs=P("data"))
    )
    np.testing.assert_array_equal(split(x), jax.jit(jax.grad(lambda x: gelu(x).sum()))(x))
    slope = jax.vmap(jax.grad(erf))(x)
    np.testing.assert_allclose(slope, 2 / np.sqrt(np.pi) * np.exp(-(np.asarray(x, np.float64) ** 2)), rtol=1e-5)
