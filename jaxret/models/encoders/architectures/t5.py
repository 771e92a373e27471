"""The encoder of T5 in Linen with every hidden state exposed (v1.0 with ReLU, v1.1 with gated GELU).

As in transformers, state 0 is the embedding output, states 1 to L-1 are the raw residual stream after each block, and
state L has the final norm. Raw states are many times larger than the last state. `normalize_intermediate` gives every
block's output the final norm instead, so that layers can be compared; it is off in the reference (MLR).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxret.models.encoders.attention import ACTIVATIONS, attend, split_heads
from jaxret.models.encoders.layers import Compute, Dense, Dropout, ScaledNorm, scaled_norm
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import Stack
from jaxret.models.encoders.stored import (
    DROPOUT,
    LAYER_COUNT,
    POSITIVE,
    SPREAD,
    Architecture,
    one_of,
    stored_field,
    stored_keys,
)
from jaxret.types import HiddenStates, Tokens

T5_LACKS = {
    "cls": "T5 has no [CLS]",
    "fused_attention": "T5 adds a bias of positions to its scores",
    "prefix_tokens": "T5 has no [CLS] to replace, and no position 0",
    "mlm_head": "T5 has no head of masked language modelling",
    "positioned_masks": "T5 has no [MASK], and its embeddings hold no positions",
}


def activation(feed_forward: str) -> tuple[bool, str]:
    """Return whether there is a gate, and the name of the activation. transformers' "gated-gelu" is the tanh form."""
    gated, name = feed_forward.startswith("gated-"), feed_forward.removeprefix("gated-")
    return gated, "gelu_new" if feed_forward == "gated-gelu" else name


@dataclass(frozen=True)
class T5Config:
    """Shapes and constants of a T5 encoder. `head_size` x `num_heads` need not be `hidden_size`."""

    vocab_size: int = stored_field("vocab_size")  # rows of the table of words
    hidden_size: int = stored_field("d_model")  # width of hidden states
    num_layers: int = stored_field("num_layers", LAYER_COUNT)  # layers above the embeddings
    num_heads: int = stored_field("num_heads")  # heads of attention in a layer
    head_size: int = stored_field("d_kv")  # width of a head
    intermediate_size: int = stored_field("d_ff")  # width of the feed-forward network
    # "relu" (v1.0) or "gated-gelu" (v1.1)
    feed_forward: str = stored_field(
        "feed_forward_proj", one_of(*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)), "relu"
    )
    buckets: int = stored_field("relative_attention_num_buckets", default=32)  # buckets of relative positions
    # all distances from here on share a bucket
    max_distance: int = stored_field("relative_attention_max_distance", default=128)
    layer_norm_eps: float = stored_field("layer_norm_epsilon", POSITIVE, 1e-6)  # added to the mean square in norms
    # rate for the embeddings, attention weights and the result of each block
    dropout: float = stored_field("dropout_rate", DROPOUT, 0.1)
    # factor of the standard deviations of new parameters
    initializer_factor: float = stored_field("initializer_factor", SPREAD, 1.0)
    normalize_intermediate: bool = False  # whether intermediate states get the final norm
    model_type: str = "t5"  # name of the architecture in config.json

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text: positions are relative, so there is no limit."""
        return 2**31 - 1

    @property
    def lacks(self) -> Mapping[str, str]:
        return T5_LACKS

    @property
    def gated(self) -> bool:
        """Whether the feed-forward network has a gate."""
        return activation(self.feed_forward)[0]

    @property
    def hidden_act(self) -> str:
        """Name of the feed-forward network's activation."""
        return activation(self.feed_forward)[1]


def relative_buckets(length: int, buckets: int, max_distance: int) -> Int[jax.Array, "T T"]:
    """Return the bucket of each relative position, which is key position minus query position.

    Each direction has half of the buckets. A small distance has its own bucket; larger distances share buckets
    whose width grows logarithmically up to `max_distance`.
    """
    distance = jnp.arange(length)[None] - jnp.arange(length)[:, None]  # [query,key]
    half = buckets // 2
    return jnp.where(distance > 0, half, 0) + distance_buckets(jnp.abs(distance), half, max_distance)


def distance_buckets(distance: Int[jax.Array, "Q T"], buckets: int, max_distance: int) -> Int[jax.Array, "Q T"]:
    """Return the bucket of each distance in one direction. Half of the buckets hold a single distance each."""
    exact = buckets // 2
    scale = (buckets - exact) / math.log(max_distance / exact)
    far_buckets = exact + (jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) * scale).astype(jnp.int32)
    return jnp.where(distance < exact, distance, jnp.minimum(far_buckets, buckets - 1))


class T5Layer(nn.Module):
    """A pre-norm layer. It returns its output and its selected states."""

    config: T5Config
    compute: Compute
    selection: Selection

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "R W H"],
        layout: TokenLayout,
        position_bias: Float[jax.Array, "heads W W"],
        final_scale: Float[jax.Array, " H"],
    ) -> tuple[Float[jax.Array, "R W H"], Float[jax.Array, "N K H"] | None]:
        config = self.config
        drop, width = Dropout(config.dropout, layout), config.num_heads * config.head_size

        def dense(features: int, name: str, deviation: float) -> Dense:
            init = nn.initializers.normal(config.initializer_factor * deviation)
            return Dense(features, self.compute, init, use_bias=False, layout=layout, name=name)

        def heads(name: str, deviation: float) -> Float[jax.Array, "R W heads width"]:
            return split_heads(dense(width, name, deviation)(inputs), config.num_heads)

        inputs = ScaledNorm(config.layer_norm_eps, name="attention_norm")(hidden)
        # Scores are not divided by sqrt(head size).
        query = heads("query", (config.hidden_size * config.head_size) ** -0.5)
        key, value = (heads(name, config.hidden_size**-0.5) for name in ("key", "value"))
        context = attend(query, key, value, layout.attention_mask, drop, position_bias, self.compute)
        hidden = hidden + drop(dense(config.hidden_size, "output", width**-0.5)(context))

        inputs = ScaledNorm(config.layer_norm_eps, name="feed_forward_norm")(hidden)
        wide = ACTIVATIONS[config.hidden_act](dense(config.intermediate_size, "wide", config.hidden_size**-0.5)(inputs))
        if config.gated:
            wide = wide * dense(config.intermediate_size, "gate", config.hidden_size**-0.5)(inputs)
        hidden = hidden + drop(dense(config.hidden_size, "narrow", config.intermediate_size**-0.5)(drop(wide)))
        if self.selection.layers == "last":
            return hidden, None
        states = scaled_norm(hidden, final_scale, config.layer_norm_eps) if config.normalize_intermediate else hidden
        return hidden, self.selection.select(states, layout)[0]


class T5(nn.Module):
    """Tokens -> HiddenStates."""

    config: T5Config
    compute: Compute = Compute()

    def setup(self) -> None:
        config, normal = self.config, nn.initializers.normal
        self.word = nn.Embed(config.vocab_size, config.hidden_size, embedding_init=normal(config.initializer_factor))
        deviation = config.initializer_factor * config.hidden_size**-0.5
        self.position_bias = nn.Embed(config.buckets, config.num_heads, embedding_init=normal(deviation))
        self.final_norm = self.param("final_norm", nn.initializers.ones, (config.hidden_size,))

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        return self.word.embedding

    @nn.compact
    def __call__(
        self, tokens: Tokens, selection: Selection = Selection(), train: bool = False, prefix: jax.Array | None = None
    ) -> HiddenStates:
        if prefix is not None:
            raise ValueError(f"prefix tokens are not supported: {T5_LACKS['prefix_tokens']}")
        config, layout = self.config, TokenLayout.of(tokens, train)
        drop = Dropout(config.dropout, layout, name="drop")
        embeddings = drop(layout.embed(self.word, tokens.ids, None))
        # In packed rows, too, the distance of two tokens of a text is their distance in the row.
        buckets = relative_buckets(embeddings.shape[1], config.buckets, config.max_distance)
        bias = jnp.transpose(self.position_bias(buckets), (2, 0, 1))  # [heads,W,W], shared by all layers
        make_layer = partial(T5Layer, config, self.compute, selection)
        layers = Stack(make_layer, config.num_layers, self.compute, name="layers")
        # T5 has no [CLS]. Heads select the mean or all tokens, so the last layer computes all positions.
        last, intermediate = layers(embeddings, layout, bias, self.final_norm)
        last = drop(scaled_norm(last, self.final_norm, config.layer_norm_eps))
        return selection.collect(embeddings, intermediate, last, layout)


T5_NAMES = {
    "word": "shared",
    "position_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "final_norm": "encoder.final_layer_norm.weight",
    "layers/attention_norm": "encoder.block.{}.layer.0.layer_norm",
    "layers/query": "encoder.block.{}.layer.0.SelfAttention.q",
    "layers/key": "encoder.block.{}.layer.0.SelfAttention.k",
    "layers/value": "encoder.block.{}.layer.0.SelfAttention.v",
    "layers/output": "encoder.block.{}.layer.0.SelfAttention.o",
    "layers/feed_forward_norm": "encoder.block.{}.layer.1.layer_norm",
    "layers/narrow": "encoder.block.{}.layer.1.DenseReluDense.wo",
}
UNGATED = {"layers/wide": "encoder.block.{}.layer.1.DenseReluDense.wi"}
GATED = {  # v1.1
    "layers/wide": "encoder.block.{}.layer.1.DenseReluDense.wi_0",
    "layers/gate": "encoder.block.{}.layer.1.DenseReluDense.wi_1",
}


def translate_t5(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json unchanged. Raises ValueError if `is_gated_act` or `dense_act_fn`, which transformers uses,
    disagrees with `feed_forward_proj`."""
    feed_forward = str(raw.get("feed_forward_proj", "relu"))
    for key, value in zip(("is_gated_act", "dense_act_fn"), activation(feed_forward), strict=True):
        if raw.get(key, value) != value:
            raise ValueError(f"{key} is {raw[key]!r}, but feed_forward_proj {feed_forward!r} means {value!r}")
    return raw


def check_t5(config: T5Config) -> Iterator[tuple[str, str]]:
    """Yield (field, requirement) of each value that conflicts with another."""
    if config.buckets < 4:
        yield "buckets", "be at least 4: small and large distances in two directions"
    if config.max_distance <= config.buckets // 4:
        yield "max_distance", f"be above {config.buckets // 4}: smaller distances have buckets of their own"


ARCHITECTURE = Architecture(
    "t5",
    T5Config,
    T5,
    stored_keys(T5Config),
    lambda config: T5_NAMES | (GATED if config.gated else UNGATED),
    class_name="T5EncoderModel",
    translate=translate_t5,
    check=check_t5,
    # Files of the full model store the word table a second and third time.
    buffers=("encoder.embed_tokens", "decoder.embed_tokens"),
)
