"""Products of an encoder and their gradients, compared with NumPy in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.layers import product

SHAPES = {  # the operands of products, with as many rows as a training batch has tokens
    "abi,io->abo": ((4, 32, 64), (64, 16)),  # a dense layer that narrows
    "abi,io->abo wide": ((4, 32, 16), (16, 64)),
    "bhqw,bhkw->bhqk": ((2, 3, 64, 16), (2, 3, 64, 16)),  # attention's scores
    "bhqk,bhkw->bhqw": ((2, 3, 64, 64), (2, 3, 64, 16)),  # attention's weighted sum
    "bhgqk,bhkw->bhgqw": ((2, 2, 3, 64, 64), (2, 2, 64, 16)),  # a weighted sum if heads share keys
    "ah,vh->av": ((8, 16), (50, 16)),  # logits of words
}


def operands(name: str) -> tuple[str, jax.Array, jax.Array, jax.Array]:
    """Return the spec, two operands and a gradient of the result."""
    spec, random = name.split()[0], np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in SHAPES[name])
    return spec, a, b, jnp.asarray(random.normal(size=jnp.einsum(spec, a, b).shape), jnp.float32)


def gradient_of_right(spec: str, a: Any, b: Any, g: Any) -> jax.Array:
    _, pull = jax.vjp(lambda b: product(spec, a, b, jnp.float32, jnp.float32), b)
    return pull(g)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_the_products_of_numpy(name: str) -> None:
    spec, a, b, g = operands(name)
    result, pull = jax.vjp(lambda a, b: product(spec, a, b, jnp.float32, jnp.float32), a, b)
    (left, right), out = spec.partition("->")[0].split(","), spec.partition("->")[2]
    of_a = np.einsum(f"{out},{right}->{left}", np.float64(g), np.float64(b))
    of_b = np.einsum(f"{left},{out}->{right}", np.float64(a), np.float64(g))
    np.testing.assert_allclose(result, np.einsum(spec, np.float64(a), np.float64(b)), atol=1e-4)
    for ours, expected in zip(pull(g), (of_a, of_b), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_the_gradient_of_the_right_operand_copies_the_smaller_array(name: str) -> None:
    """On a CPU, copies and transpositions in the compiled program are at most as large as the smaller of the left
    operand and the result's gradient, or as large as the gradient that is computed."""
    spec, a, b, g = operands(name)
    text = jax.jit(gradient_of_right, static_argnums=0).lower(spec, a, b, g).compile().as_text()
    assert text is not None
    copies = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in copies]
    assert max(sizes, default=0) <= max(min(a.size, g.size), b.size)
