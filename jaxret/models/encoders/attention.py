"""What every transformer here shares: attention over the real keys, rotary positions, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.fused import fused
from jaxret.models.encoders.layers import MASKED, Compute, Drop, product


def gelu(x: jax.Array) -> jax.Array:
    """With erf, as BERT means it; Flax's default is tanh. JAX's exact one has erfc, which costs a CPU more; but in
    fewer digits than float32's 1 + erf would lose its tail."""
    if x.dtype == jnp.float32:
        return 0.5 * x * (1 + jax.lax.erf(x * 2**-0.5))
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def split_heads(flat: Float[jax.Array, "B T W"], heads: int) -> Float[jax.Array, "B T heads width"]:
    return flat.reshape(*flat.shape[:2], heads, flat.shape[2] // heads)


def attend(
    query: Float[jax.Array, "B Q heads width"],
    key: Float[jax.Array, "B T heads width"],
    value: Float[jax.Array, "B T heads width"],
    mask: Bool[jax.Array, "B T"] | Bool[jax.Array, "B Q T"],
    drop: Drop | Callable[[jax.Array], jax.Array],
    bias: Float[jax.Array, "heads Q T"] | None = None,
    compute: Compute = Compute(),
) -> Float[jax.Array, "B Q W"]:
    """softmax(query·key + bias) over the keys that `mask` has (for all queries, or for each), in float32; `drop` is the
    weights' dropout; heads are concatenated. A scale, where there is one, is the caller's: T5 has none.

    Where a text attends to itself, by the kernel that `compute` names, if it names one. Raises ValueError for a mask
    or a bias that kernels do not have.
    """
    if compute.attention != "plain" and query.shape[1] == key.shape[1]:
        if mask.ndim == 3 or bias is not None or not isinstance(drop, Drop):
            raise ValueError(f"encoder.attention={compute.attention!r} has no mask for each query, and no bias")
        mixed = fused(query, key, value, mask, drop, compute)
    else:
        mixed = _plain(query, key, value, mask, drop, bias)
    return checkpoint_name(mixed, "mixed").reshape(*mixed.shape[:2], -1)


def _plain(query: Any, key: Any, value: Any, mask: Any, drop: Any, bias: Any) -> Float[jax.Array, "B Q heads width"]:
    dtype = query.dtype
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B,heads,T,width], as products want it
    scores = product("bhqw,bhkw->bhqk", query, key, dtype, jnp.float32)
    scores = scores if bias is None else scores + bias
    seen = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
    return jnp.swapaxes(product("bhqk,bhkw->bhqw", drop(weights), value, dtype, dtype), 1, 2)


def rotate(
    heads: Float[jax.Array, "B T heads width"], positions: Int[jax.Array, "*rows T"], rates: Float[jax.Array, " half"]
) -> Float[jax.Array, "B T heads width"]:
    """Rotary positions: dimensions i and i + width/2 are turned by position * rates[i] radians, in float32. A product
    of two turned vectors depends on the distance of their positions alone. [Su et al. 2021]"""
    angles = positions.astype(jnp.float32)[..., None, None] * rates  # [T,1,half], or [B,T,1,half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)


def require_length(length: int, longest: int) -> None:
    """Raises ValueError if a batch of `length` tokens is too long for an encoder."""
    if length > longest:
        raise ValueError(
            f"a batch of {length} tokens is longer than the encoder's {longest} positions; "
            f"lower tokens.query_length or tokens.passage_length"
        )


def vocabulary_logits(
    hidden: Float[jax.Array, "*batch H"], table: Float[jax.Array, "vocabulary H"], compute: Compute
) -> Float[jax.Array, "*batch vocabulary"]:
    """How well each word fits, before a bias: its row of the table times the state, in float32."""
    rows = "abc"[: hidden.ndim - 1]
    return product(f"{rows}h,vh->{rows}v", hidden, table, compute.dtype, jnp.float32)
