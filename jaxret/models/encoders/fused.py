"""Attention in one kernel, which keeps no weights in memory: which there are, where they run, what they need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.models.encoders.flash import flash_attention
from jaxret.models.encoders.layers import Compute, Drop

# encoder.attention -> where it runs; "": everywhere.
PLATFORMS = {"plain": "", "cudnn": "gpu", "flash": "tpu"}


def told(attention: str) -> str:
    """What is said of it at the start."""
    if attention == "plain":
        return "attention: plain"
    return f"attention: {attention} where a text attends to itself; plain where few positions do, or those of another"


def require_kernel(attention: str, platform: str) -> None:
    """Raises ValueError if it does not run on `platform`, as JAX calls it: there is no other that would be taken."""
    needed, found = PLATFORMS[attention], "gpu" if platform in ("cuda", "rocm") else platform
    if needed and found != needed:
        raise ValueError(
            f"encoder.attention is {attention!r}, which runs on a {needed.upper()}, and here is a {found.upper()}: "
            "choose another (jaxret encode and search: --attention=plain)"
        )


def require_no_dropout(attention: str, rate: float) -> None:
    """Raises ValueError where a kernel would have to drop weights, and cannot."""
    if attention == "cudnn" and rate:
        raise ValueError(
            "encoder.attention is 'cudnn', which has no dropout of attention weights, and the encoder's rate is "
            f"{rate} (attention_probs_dropout_prob): set encoder.attention_dropout=0, or encoder.attention='plain'"
        )


def fused(
    query: Float[jax.Array, "B T heads width"],
    key: Float[jax.Array, "B T heads width"],
    value: Float[jax.Array, "B T heads width"],
    mask: Bool[jax.Array, "B T"],
    drop: Drop,
    compute: Compute,
) -> Float[jax.Array, "B T heads width"]:
    """What `attention.attend` does, by the kernel of `compute`. cuDNN knows lengths, not masks: real keys come first,
    as they do in `Tokens`; a text without any sees its first one, for which nobody asks."""
    require_no_dropout(compute.attention, drop.rate)
    if compute.attention == "cudnn":
        lengths = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32), 1)
        return jax.nn.dot_product_attention(
            query, key, value, scale=1.0, key_value_seq_lengths=lengths, implementation="cudnn"
        )
    keys = _numbers(drop.keys()) if drop.rate else None
    return flash_attention(query, key, value, mask, drop.rate, keys, compute.interpret)


def _numbers(keys: Any) -> jax.Array:
    """int32 [B,2] of keys [B]."""
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if str(jax.random.key_impl(keys)) != "threefry2x32" or not partitionable:
        raise ValueError(
            "encoder.attention='flash' drops weights as JAX's default generator does; unset jax_default_prng_impl and "
            "jax_threefry_partitionable"
        )
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
