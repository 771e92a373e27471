"""Dropout scales the numbers that it keeps; the mask differs for every text, call and layer."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.stack import Stack
from tests import tiny

TEXTS, LENGTH, WIDTH, RATE = 3, 4, 16, 0.25
LAYOUT = TokenLayout.of(tiny.make_tokens(TEXTS, LENGTH), train=True)
ONES = jnp.ones((TEXTS, LENGTH, WIDTH))


class TwoCalls(nn.Module):
    """Two dropout modules on the same numbers."""

    def setup(self) -> None:
        self.first, self.second = Dropout(RATE, LAYOUT), Dropout(RATE, LAYOUT)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.stack([self.first(x), self.second(x)])


class Layer(nn.Module):
    """A layer that adds dropout of ones to its input."""

    @nn.compact
    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = self.param("scale", nn.initializers.ones, ())
        dropped = scale * Dropout(RATE, LAYOUT)(jnp.ones_like(hidden))
        return hidden + dropped, dropped


def test_kept_numbers_are_divided_by_the_share_that_is_kept() -> None:
    dropped = np.asarray(TwoCalls().apply({}, ONES, rngs={"dropout": jax.random.key(0)}))
    np.testing.assert_allclose(np.unique(dropped), [0, 1 / (1 - RATE)], rtol=1e-6)
    assert abs(dropped.mean() - 1) < 0.1, "the mean is the same"


def test_initializing_draws_no_masks() -> None:
    """Each start of a run traces the initialization, and no parameter depends on what dropout keeps."""
    layer, key = Layer(), jax.random.key(0)
    init = jax.make_jaxpr(lambda: layer.init({"params": key, "dropout": key}, ONES))
    assert "random_bits" not in str(init())
    train = jax.make_jaxpr(lambda params: layer.apply(params, ONES, rngs={"dropout": key}))
    assert "random_bits" in str(train({"params": {"scale": 1.0}}))


def test_every_call_and_text_has_its_own_mask() -> None:
    masks = np.asarray(TwoCalls().apply({}, ONES, rngs={"dropout": jax.random.key(0)})).reshape(-1, LENGTH * WIDTH)
    assert len(np.unique(masks, axis=0)) == 2 * TEXTS


@pytest.mark.parametrize("unrolled", [False, True])
def test_every_layer_of_a_stack_has_its_own_masks(unrolled: bool) -> None:
    stack: Any = Stack(Layer, 4, Compute(unrolled=unrolled), name="layers")
    params = {"params": {"scale": jnp.ones(4)}}
    last, below = stack.apply(params, jnp.zeros_like(ONES), rngs={"dropout": jax.random.key(0)})
    masks = np.asarray(jnp.concatenate([below, last[None] - below.sum(axis=0)])).reshape(4 * TEXTS, -1)
    assert len(np.unique(masks.round(3), axis=0)) == 4 * TEXTS
