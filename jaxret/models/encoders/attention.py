"""Parts that all transformers share: attention, rotary positions, activations, the MLM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.fused import fused_attention
from jaxret.models.encoders.layers import MASKED_LOGIT, Compute, Dropout, product
from jaxret.models.encoders.window import WindowMask


@jax.custom_jvp
def erf(x: jax.Array) -> jax.Array:
    """Return the error function of x, with a derivative that works inside `jax.shard_map` on every supported JAX.

    In jax 0.12.0 the derivative of `jax.lax.erf` calls `jax.lax.polynomial`, which raises inside `jax.shard_map`
    (Primitive polynomial requires varying manual axes to match): the cause is its coefficients, constants that do not
    vary over the mesh (docs/upstream.md). This derivative is the formula that JAX 0.10 and 0.11 use, in the same order
    of operations.
    """
    return jax.lax.erf(x)


erf.defjvps(lambda tangent, _, x: jnp.asarray(2 * np.pi**-0.5, x.dtype) * (tangent * jnp.exp(-jnp.square(x))))


def gelu(x: jax.Array) -> jax.Array:
    """Return the exact GELU of x, 0.5 x (1 + erf(x / sqrt(2))), as BERT defines it; Flax's default is the tanh form.

    `jax.nn.gelu(approximate=False)` uses erfc. Value and gradient then take 4 to 11 % longer on a CPU (python
    bench/alternatives.py). It is used below float32, where 1 + erf would lose the tail.
    """
    if x.dtype == jnp.float32:
        return 0.5 * x * (1 + erf(x * 2**-0.5))
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
    key: Float[jax.Array, "B T kv_heads width"],
    value: Float[jax.Array, "B T kv_heads width"],
    mask: Bool[jax.Array, "B T"] | Bool[jax.Array, "B Q T"] | WindowMask,
    drop: Dropout | Callable[[jax.Array], jax.Array],
    bias: Float[jax.Array, "heads Q T"] | None = None,
    compute: Compute = Compute(),
) -> Float[jax.Array, "B Q W"]:
    """Return softmax(query·key + bias) value with concatenated heads; the softmax is computed in float32.

    Self-attention uses the kernel that `compute` names, if any.

    Args:
        query: queries. The caller scales them, except for T5, which has no scaling.
        key, value: keys and values of the tokens to attend to. Each of their heads serves heads / kv_heads consecutive
          query heads.
        mask: keys to attend to: one mask for all queries, one for each query, or a window around each query.
        drop: dropout of the attention weights.
        bias: term that is added to the scores.
        compute: dtype and kernel.

    Raises:
        ValueError: a kernel gets a mask for each query or a bias, which it does not support.
    """
    if compute.attention != "plain" and query.shape[1] == key.shape[1]:
        keys = mask.keys if isinstance(mask, WindowMask) else mask
        if keys.ndim == 3 or bias is not None or not isinstance(drop, Dropout):
            raise ValueError(f"encoder.attention={compute.attention!r} supports no mask for each query, and no bias")
        context = fused_attention(query, key, value, mask, drop, compute)
    else:
        mask = mask.dense(query.shape[1]) if isinstance(mask, WindowMask) else mask
        context = _plain(query, key, value, mask, drop, bias)
    return checkpoint_name(context, "mixed").reshape(*context.shape[:2], -1)


def _plain(query: Any, key: Any, value: Any, mask: Any, drop: Any, bias: Any) -> Float[jax.Array, "B Q heads width"]:
    dtype = query.dtype
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B,heads,T,width], the order of products
    if query.shape[1] == key.shape[1]:
        scores = product("bhqw,bhkw->bhqk", query, key, dtype, jnp.float32)
    else:  # heads that share a key get a separate axis, so that no key is copied
        query_groups = query.reshape(len(query), key.shape[1], -1, *query.shape[2:])
        scores = product("bhgqw,bhkw->bhgqk", query_groups, key, dtype, jnp.float32)
        scores = scores.reshape(*query.shape[:3], key.shape[2])
    scores = scores if bias is None else scores + bias
    mask = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
    scores = jnp.where(mask, scores, MASKED_LOGIT)
    if isinstance(drop, Dropout) and drop.training:  # jax.nn.softmax saves the fewest arrays for the gradient
        return jnp.swapaxes(_weighted_values(drop(jax.nn.softmax(scores, axis=-1)), value, dtype, dtype), 1, 2)
    # Dividing the result takes fewer divisions than dividing the weights. It saves an eighth of encoding on a CPU.
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    context = _weighted_values(drop(weights), value, dtype, jnp.float32) / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.swapaxes(context.astype(dtype), 1, 2)


def _weighted_values(weights: Any, value: Any, dtype: Any, out: Any) -> Float[jax.Array, "B heads Q width"]:
    if weights.shape[1] == value.shape[1]:
        return product("bhqk,bhkw->bhqw", weights, value, dtype, out)
    groups = weights.reshape(len(weights), value.shape[1], -1, *weights.shape[2:])
    return product("bhgqk,bhkw->bhgqw", groups, value, dtype, out).reshape(*weights.shape[:3], value.shape[3])


def rotate(
    heads: Float[jax.Array, "B T heads width"], positions: Int[jax.Array, "*rows T"], rates: Float[jax.Array, " half"]
) -> Float[jax.Array, "B T heads width"]:
    """Return heads with rotary position embeddings (Su et al. 2021), computed in float32.

    Dimensions i and i + width/2 are rotated by position * rates[i] radians.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * rates  # [T,1,half], or [B,T,1,half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    states = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return states.astype(heads.dtype)


def require_length(length: int, longest: int) -> None:
    """Raise ValueError if a batch of `length` tokens is too long for an encoder."""
    if length > longest:
        raise ValueError(
            f"a batch of {length} tokens is longer than the encoder's {longest} positions; "
            f"lower tokens.query_length or tokens.passage_length"
        )


class MlmHead(nn.Module):
    """The head of masked language modelling (Devlin et al. 2019): hidden states -> logits over the vocabulary.

    Dense layer, activation, norm, product with the word table, bias.
    """

    compute: Compute
    activation: str
    dense: Callable[[], nn.Module]  # makes a module called "dense"
    norm: Callable[[], nn.Module]  # makes a module called "norm"

    @nn.compact
    def __call__(
        self, hidden: Float[jax.Array, "*batch H"], table: Float[jax.Array, "vocabulary H"]
    ) -> Float[jax.Array, "*batch vocabulary"]:
        states = self.norm()(ACTIVATIONS[self.activation](self.dense()(hidden)))
        batch = "abc"[: states.ndim - 1]
        logits = product(f"{batch}h,vh->{batch}v", states, table, self.compute.dtype, jnp.float32)
        return logits + self.param("bias", nn.initializers.zeros, (table.shape[0],))
