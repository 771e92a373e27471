"""Weights of the vocabulary's words: the maximum over a text's tokens for each word, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int


def uniform_like_torch(key: jax.Array, shape: tuple[int, ...], dtype: Any, fan_in: int) -> jax.Array:
    """Draw from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), torch's initial values of weights and biases of a linear layer.

    Args:
        key: random key.
        shape: shape of the result.
        dtype: type of the result.
        fan_in: input size of the layer.
    """
    return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)


def torch_linear(features: int, fan_in: int, name: str) -> nn.Dense:
    """Return a float32 linear layer with torch's initialization, as in Aggretriever's code."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return uniform_like_torch(key, shape, dtype, fan_in)

    return nn.Dense(features, precision=jax.lax.Precision.HIGHEST, kernel_init=init, bias_init=init, name=name)


def require_chunk(name: str, chunk: int) -> None:
    """Raise ValueError unless the key `chunk` of a head is above 0."""
    if chunk < 1:
        raise ValueError(f"head.{name}.chunk is {chunk}; it must be at least 1, the number of tokens at a time")


def mlm_logits(encoder: Any) -> Callable[[jax.Array], jax.Array]:
    """Return the encoder's MLM head, states -> logits, as a pure function, which a scan needs."""
    mlm_head, variables = encoder.mlm_head.unbind()
    return partial(mlm_head.apply, variables, table=encoder.word_table)


def strongest(
    probabilities: Callable[[Float[jax.Array, "B c H"]], Float[jax.Array, "B c vocabulary"]],
    hidden: Float[jax.Array, "B T H"],
    weights: Float[jax.Array, "B T"],
    mask: Bool[jax.Array, "B T"],
    chunk: int,
    train: bool,
) -> Float[jax.Array, "B vocabulary"]:
    """Return v[t] = max(0, max_i w_i p_i[t]) over real tokens i (Aggretriever eq. 3), without an array
    [B,T,vocabulary].

    Inference needs only a running maximum. In training, a first pass without gradient finds the token with the largest
    value for each word; the first of equal tokens wins. A second pass sums the values of these tokens. The backward
    pass computes one chunk after the other again, so that only one chunk is in memory.

    Args:
        probabilities: hidden states -> p.
        hidden: hidden states of the tokens.
        weights: weights w of the tokens.
        mask: real tokens.
        chunk: number of tokens at a time.
        train: whether a gradient is needed.
    """
    batch, length = mask.shape
    chunks = -(-length // chunk)
    extra = chunks * chunk - length

    def split(x: jax.Array) -> jax.Array:  # [chunks, B, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)

    parts = split(hidden), split(weights), split(mask), jnp.arange(chunks)

    def values(states: jax.Array, factors: jax.Array, real: jax.Array) -> Float[jax.Array, "B c vocabulary"]:
        return jnp.where(real[..., None], factors[..., None] * probabilities(states), 0.0)

    def find(carry: tuple[jax.Array, jax.Array], part: Any) -> tuple[Any, None]:
        best, winner = carry
        *inputs, number = part
        products = jax.lax.stop_gradient(values(*inputs))
        top = jnp.max(products, axis=1)
        position = number * chunk + jnp.argmax(products, axis=1)
        return (jnp.maximum(best, top), jnp.where(top > best, position, winner)), None

    vocabulary = jax.eval_shape(probabilities, parts[0][0]).shape[-1]
    # Computed from the mask, so that inside `jax.shard_map` it varies over devices, like the carry of the scan.
    zeros = jnp.where(mask[:, :1], 0.0, jnp.zeros(vocabulary))
    (best, winner), _ = jax.lax.scan(find, (zeros, zeros.astype(jnp.int32) - 1), parts)
    if not train:
        return best

    @jax.checkpoint
    def gather(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        *inputs, number = part
        wins = (number * chunk + jnp.arange(chunk))[None, :, None] == winner[:, None]
        return total + jnp.sum(jnp.where(wins, values(*inputs), 0.0), axis=1), None

    total, _ = jax.lax.scan(gather, zeros, parts)
    return total


def one_hot_maximum(
    ids: Int[jax.Array, "B T"], weights: Float[jax.Array, "B T"], mask: Bool[jax.Array, "B T"], vocabulary: int
) -> Float[jax.Array, "B vocabulary"]:
    """Return v[t] = max(0, max w_i over the positions i of token t).

    Args:
        ids: ids of the tokens.
        weights: weights w of the tokens.
        mask: real tokens.
        vocabulary: size of the vocabulary.
    """
    rows = jnp.arange(len(ids))[:, None]
    return jnp.zeros((len(ids), vocabulary)).at[rows, ids].max(jnp.where(mask, weights, 0.0))
