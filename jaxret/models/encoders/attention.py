"""What every transformer here shares: attention over the real keys, and the scan over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

MASKED = -1e30  # a score that softmax turns into exactly 0, and that stays finite in a row of nothing but padding


def split_heads(flat: Float[jax.Array, "B T W"], heads: int) -> Float[jax.Array, "B T heads width"]:
    return flat.reshape(*flat.shape[:2], heads, flat.shape[2] // heads)


def attend(
    query: Float[jax.Array, "B Q heads width"],
    key: Float[jax.Array, "B T heads width"],
    value: Float[jax.Array, "B T heads width"],
    mask: Bool[jax.Array, "B T"],
    drop: Callable[[jax.Array], jax.Array],
    bias: Float[jax.Array, "heads Q T"] | None = None,
) -> Float[jax.Array, "B Q W"]:
    """softmax(query·key + bias) over the keys that `mask` has, in float32; `drop` is the weights' dropout; heads are
    concatenated. A scale, where there is one, is the caller's: T5 has none."""
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    scores = jnp.einsum("bqhw,bkhw->bhqk", query, key, precision=precision, preferred_element_type=jnp.float32)
    scores = scores if bias is None else scores + bias
    weights = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, MASKED), axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bhqk,bkhw->bqhw", drop(weights), value, precision=precision)
    return mixed.reshape(*mixed.shape[:2], -1)


def scan_layers(layer: type[nn.Module], length: int, remat: bool = False) -> Any:
    """`length` copies of `layer` as one module: parameters of all lie in one array with a leading layer axis, so
    compile time does not grow with depth. `remat` recomputes each layer in the backward pass."""
    return nn.scan(
        nn.remat(layer, prevent_cse=False) if remat else layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=nn.broadcast,
        length=length,
    )
