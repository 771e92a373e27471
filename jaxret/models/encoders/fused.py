"""Fused attention kernels, which keep no attention weights in memory: their platforms, their limits, the call."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.window import WindowMask

# Value of encoder.attention -> the platform that it needs; "": any platform.
ATTENTION_PLATFORMS = {"plain": "", "cudnn": "gpu", "flash": "tpu"}


def describe_attention(attention: str) -> str:
    """Return the line about attention that is printed at the start of training."""
    if attention == "plain":
        return "attention: plain"
    return f"attention: {attention} where all tokens of a text attend to the text; plain elsewhere"


def require_kernel(attention: str, platform: str) -> None:
    """Raise ValueError if an attention does not run on `platform`, as JAX names it. There is no fallback."""
    target, current = ATTENTION_PLATFORMS[attention], "gpu" if platform in ("cuda", "rocm") else platform
    if target and current != target:
        raise ValueError(
            f"encoder.attention is {attention!r}, which needs a {target.upper()}, but JAX runs on a {current.upper()}: "
            "choose another (jaxret encode and search: --attention=plain)"
        )


def require_no_dropout(attention: str, rate: float) -> None:
    """Raise ValueError for dropout of attention weights in a kernel that does not support it."""
    if attention == "cudnn" and rate:
        raise ValueError(
            "encoder.attention is 'cudnn', which has no dropout of attention weights, and the encoder's rate is "
            f"{rate} (attention_probs_dropout_prob): set encoder.attention_dropout=0, or encoder.attention='plain'"
        )


def fused_attention(
    query: Float[jax.Array, "B T heads width"],
    key: Float[jax.Array, "B T kv_heads width"],
    value: Float[jax.Array, "B T kv_heads width"],
    mask: Bool[jax.Array, "B T"] | WindowMask,
    drop: Dropout,
    compute: Compute,
) -> Float[jax.Array, "B T heads width"]:
    """Return the same as `attention.attend`, computed by the kernel that `compute` names.

    Args:
        query, key, value: queries, keys and values of the same tokens.
        mask: real keys, which come first in a text, because cuDNN takes lengths instead of masks. With cuDNN, a text
          without real keys attends to its first token; its states are not used. With a `WindowMask`, keys outside of
          the window are left out, too.
        drop: dropout of the attention weights.
        compute: options, which name the kernel.

    Raises:
        ValueError: the kernel does not support dropout.
    """
    require_no_dropout(compute.attention, drop.rate if drop.active else 0.0)
    if compute.attention == "cudnn":
        return _cudnn(query, key, value, mask)
    from jaxret.models.encoders.flash import flash_attention  # imports Pallas, which plain attention does not need

    if not drop.active:
        return flash_attention(query, key, value, mask, interpret=compute.interpret)
    return flash_attention(query, key, value, mask, drop.rate, _key_data(drop.keys()), compute.interpret)


def _cudnn(query: Any, key: Any, value: Any, mask: Any) -> jax.Array:
    keys = mask.keys if isinstance(mask, WindowMask) else mask
    lengths = jnp.maximum(jnp.sum(keys, axis=1, dtype=jnp.int32), 1)
    kernel = partial(jax.nn.dot_product_attention, scale=1.0, key_value_seq_lengths=lengths, implementation="cudnn")
    if not isinstance(mask, WindowMask):
        return kernel(query, key, value)
    # The window is a constant of cuDNN's kernel, so each window has a kernel.
    kernels = [partial(kernel, **_cudnn_window(mask, *choice)) for choice in mask.choices]
    is_choice = (jnp.asarray(mask.choices) == jnp.stack([mask.backward, mask.forward])).all(axis=1)
    return jax.lax.switch(jnp.argmax(is_choice), kernels, query, key, value)


def _cudnn_window(mask: WindowMask, backward: int, forward: int) -> dict[str, Any]:
    """Return the options of cuDNN's attention for a window. cuDNN itself knows only windows that end at the query."""
    length = mask.keys.shape[1]
    if min(backward, forward) >= length - 1:
        return {}
    if forward == 0:
        return {"is_causal": True, "local_window_size": None if backward >= length - 1 else (backward, 0)}
    return {"mask": mask.within_window(length, backward, forward)[None, None]}


def _key_data(keys: Any) -> jax.Array:
    """Return the data of random keys [B] as int32 [B,2]."""
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if str(jax.random.key_impl(keys)) != "threefry2x32" or not partitionable:
        raise ValueError(
            "encoder.attention='flash' needs JAX's default random generator; unset jax_default_prng_impl and "
            "jax_threefry_partitionable"
        )
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
