"""The encoder of T5 in Linen with every hidden state exposed (v1.0 with ReLU, v1.1 with gated GELU).

As in transformers, state 0 is the embedding output, states 1 to L-1 are the raw residual stream after each block, and
state L has the final norm: raw states are many times larger than the last one. `normalize_intermediate` gives every
block's output the final norm instead, so that layers can be compared; it is off in the reference (MLR).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.attention import attend, scan_layers, split_heads
from jaxret.models.encoders.bert import ACTIVATIONS
from jaxret.models.encoders.keep import Keep
from jaxret.types import HiddenStates, Tokens


@dataclass(frozen=True)
class T5Config:
    """Shapes and constants of a T5 encoder. `head_size` x `num_heads` need not be `hidden_size`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    intermediate_size: int
    feed_forward: str = "relu"  # "relu" (v1.0) or "gated-gelu" (v1.1)
    buckets: int = 32
    max_distance: int = 128
    layer_norm_eps: float = 1e-6
    dropout: float = 0.1
    initializer_factor: float = 1.0
    normalize_intermediate: bool = False
    model_type: Literal["t5"] = "t5"

    @property
    def longest(self) -> int:
        """Tokens that a text may have: positions are relative, so there is no limit."""
        return 2**31 - 1

    @property
    def lacks(self) -> Mapping[str, str]:
        return {
            "cls": "T5 has no [CLS]; set head.token='mean'",
            "leading": "T5 has no [CLS] that others could take the place of",
            "mlm_head": "T5 has no head of masked language modelling",
            "positioned_masks": "T5 has no [MASK]",
        }

    @property
    def gated(self) -> bool:
        return self.feed_forward.startswith("gated-")

    @property
    def hidden_act(self) -> str:
        """transformers reads "gated-gelu" as the tanh approximation."""
        name = self.feed_forward.removeprefix("gated-")
        return "gelu_new" if self.gated and name == "gelu" else name


def relative_buckets(length: int, buckets: int, max_distance: int) -> Int[jax.Array, "T T"]:
    """The bucket of key position minus query position: half for each direction; small distances have their own,
    larger ones share, in steps that grow with the logarithm up to `max_distance`."""
    distance = jnp.arange(length)[None] - jnp.arange(length)[:, None]  # [query,key]
    half = buckets // 2
    far, exact = jnp.abs(distance), half // 2
    scale = (half - exact) / math.log(max_distance / exact)
    shared = exact + (jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / exact) * scale).astype(jnp.int32)
    bucket = jnp.where(far < exact, far, jnp.minimum(shared, half - 1))
    return jnp.where(distance > 0, half, 0) + bucket


def rms_norm(hidden: Float[jax.Array, "B T H"], scale: Float[jax.Array, " H"], eps: float) -> Float[jax.Array, "B T H"]:
    """x / rms(x) * scale, computed in float32: no mean is taken away, no bias is added."""
    wide = hidden.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (normed * scale).astype(hidden.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale."""

    eps: float

    @nn.compact
    def __call__(self, hidden: Float[jax.Array, "B T H"]) -> Float[jax.Array, "B T H"]:
        return rms_norm(hidden, self.param("scale", nn.initializers.ones, (hidden.shape[-1],)), self.eps)


class T5Layer(nn.Module):
    """One pre-norm block; returns its output and what `keep` selects of it, as nn.scan wants them."""

    config: T5Config
    dtype: Any
    keep: Keep
    train: bool

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"],
        position_bias: Float[jax.Array, "heads T T"],
        final_scale: Float[jax.Array, " H"],
    ) -> tuple[Float[jax.Array, "B T H"], Float[jax.Array, "B K H"] | None]:
        c = self.config
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        drop = nn.Dropout(c.dropout, deterministic=not self.train)

        def dense(features: int, name: str, spread: float) -> nn.Dense:
            init = nn.initializers.normal(c.initializer_factor * spread)
            return nn.Dense(
                features, use_bias=False, dtype=self.dtype, precision=precision, kernel_init=init, name=name
            )

        def heads(name: str, spread: float) -> Float[jax.Array, "B T heads width"]:
            return split_heads(dense(c.num_heads * c.head_size, name, spread)(normed), c.num_heads)

        normed = RMSNorm(c.layer_norm_eps, name="attention_norm")(hidden)
        query = heads("query", (c.hidden_size * c.head_size) ** -0.5)  # scores are not divided by sqrt(head size)
        key, value = (heads(name, c.hidden_size**-0.5) for name in ("key", "value"))
        mixed = attend(query, key, value, mask, drop, position_bias)
        hidden = hidden + drop(dense(c.hidden_size, "output", (c.num_heads * c.head_size) ** -0.5)(mixed))

        normed = RMSNorm(c.layer_norm_eps, name="feed_forward_norm")(hidden)
        wide = ACTIVATIONS[c.hidden_act](dense(c.intermediate_size, "wide", c.hidden_size**-0.5)(normed))
        if c.gated:
            wide = wide * dense(c.intermediate_size, "gate", c.hidden_size**-0.5)(normed)
        hidden = hidden + drop(dense(c.hidden_size, "narrow", c.intermediate_size**-0.5)(drop(wide)))
        if self.keep.layers == "last":
            return hidden, None
        shown = rms_norm(hidden, final_scale, c.layer_norm_eps) if c.normalize_intermediate else hidden
        return hidden, self.keep.select(shown, mask)[0]


class T5(nn.Module):
    """Tokens -> HiddenStates. `dtype` is the compute type (parameters stay float32); `remat` recomputes each layer in
    the backward pass."""

    config: T5Config
    dtype: Any = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: Tokens, keep: Keep = Keep(), train: bool = False) -> HiddenStates:
        """Encodes a batch. Dropout needs a "dropout" rng when `train`."""
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=not train)
        init = nn.initializers.normal(c.initializer_factor)
        embedded = drop(
            nn.Embed(c.vocab_size, c.hidden_size, dtype=self.dtype, embedding_init=init, name="word")(tokens.ids)
        )
        table = nn.Embed(
            c.buckets,
            c.num_heads,
            embedding_init=nn.initializers.normal(c.initializer_factor * c.hidden_size**-0.5),
            name="position_bias",
        )
        buckets = relative_buckets(tokens.ids.shape[1], c.buckets, c.max_distance)
        bias = jnp.transpose(table(buckets), (2, 0, 1))  # [heads,T,T], the same in every layer
        final_scale = self.param("final_norm", nn.initializers.ones, (c.hidden_size,))

        layers = scan_layers(T5Layer, c.num_layers, self.remat)
        last, kept = layers(c, self.dtype, keep, train, name="layers")(embedded, tokens.mask, bias, final_scale)
        state, mask = keep.select(drop(rms_norm(last, final_scale, c.layer_norm_eps)), tokens.mask)
        if keep.layers == "last":
            return HiddenStates(state[None], mask)
        first, _ = keep.select(embedded, tokens.mask)
        return HiddenStates(jnp.concatenate([first[None], kept[:-1], state[None]]), mask)
