"""The decoder of T5 in Linen, and the full encoder-decoder: tokens of a passage -> logits of the next query token.

A call of the decoder reads Q new tokens, and the keys and values of earlier tokens in a cache of fixed size. One call
with all tokens (teacher forcing) and one call for each token are the same computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.architectures.t5 import T5, T5Config, distance_buckets
from jaxret.models.encoders.attention import ACTIVATIONS, attend, split_heads
from jaxret.models.encoders.layers import Compute, Dense, ScaledNorm, product, scaled_norm
from jaxret.models.encoders.selection import Selection
from jaxret.types import Tokens


@dataclass(frozen=True)
class GeneratorConfig:
    """Shapes and constants of a T5 model with its decoder, and ids of tokens for decoding."""

    encoder: T5Config
    decoder: T5Config  # equal to `encoder` except for num_layers
    scaled_output: bool  # whether states are divided by sqrt(hidden size) before the output matrix (T5 v1.0)
    own_output: bool  # whether the output matrix differs from the word table (v1.1, Flan-T5)
    start_id: int  # first token that the decoder reads
    end_id: int  # token that ends a query
    pad_id: int


class KeysValues(NamedTuple):
    """Keys and values of all layers, for the decoded tokens or for source texts."""

    keys: Float[jax.Array, "L R U heads width"]
    values: Float[jax.Array, "L R U heads width"]


class Source(NamedTuple):
    """A batch of source texts for the decoder's cross-attention."""

    cross: KeysValues  # [L,B,T,heads,width]
    mask: Bool[jax.Array, "B T"]


def empty_cache(config: T5Config, rows: int, length: int, dtype: Any) -> KeysValues:
    """Return a cache of zeros.

    Args:
        rows: R, the number of sequences that are decoded together.
        length: U, the largest number of tokens of a sequence.
        dtype: type of keys and values.
    """
    shape = config.num_layers, rows, length, config.num_heads, config.head_size
    return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class CrossProjection(nn.Module):
    """The module that computes keys and values for the cross-attention of a layer."""

    config: T5Config
    compute: Compute

    @nn.compact
    def __call__(
        self, carry: None, states: Float[jax.Array, "B T H"]
    ) -> tuple[None, tuple[Float[jax.Array, "B T heads width"], Float[jax.Array, "B T heads width"]]]:
        config = self.config
        init = nn.initializers.normal(config.initializer_factor * config.hidden_size**-0.5)

        def heads(name: str) -> Float[jax.Array, "B T heads width"]:
            flat = Dense(config.num_heads * config.head_size, self.compute, init, use_bias=False, name=name)(states)
            return split_heads(flat, config.num_heads)

        return None, (heads("key"), heads("value"))


class DecodingStep(NamedTuple):
    """Values that all layers of a call share."""

    position: Int[jax.Array, ""]  # position of the first new token
    mask: Bool[jax.Array, "Q U"]  # cached tokens that each new token may attend to
    bias: Float[jax.Array, "heads Q U"]  # bias of relative positions
    source_mask: Bool[jax.Array, "B T"]  # real tokens of the source texts


class T5DecoderLayer(nn.Module):
    """A pre-norm layer: causal self-attention, cross-attention, feed-forward. It returns its output and the cache."""

    config: T5Config
    compute: Compute

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[jax.Array, "R Q H"], KeysValues],
        index: Int[jax.Array, ""],
        cross: KeysValues,
        step: DecodingStep,
    ) -> tuple[tuple[Float[jax.Array, "R Q H"], KeysValues], None]:
        config, (hidden, cache) = self.config, carry
        rows, positions, texts = *hidden.shape[:2], len(step.source_mask)

        def dense(features: int, name: str, deviation: float) -> Dense:
            init = nn.initializers.normal(config.initializer_factor * deviation)
            return Dense(features, self.compute, init, use_bias=False, name=name)

        def heads(name: str, deviation: float) -> Float[jax.Array, "R Q heads width"]:
            return split_heads(dense(config.num_heads * config.head_size, name, deviation)(inputs), config.num_heads)

        query_deviation, width = (config.hidden_size * config.head_size) ** -0.5, config.num_heads * config.head_size
        inputs = ScaledNorm(config.layer_norm_eps, name="attention_norm")(hidden)
        query = heads("query", query_deviation)
        cache = KeysValues(
            *(
                # Updated in place. As a scanned input and output, the cache would be copied at every token.
                jax.lax.dynamic_update_slice(
                    layers_cache,
                    heads(name, config.hidden_size**-0.5)[None].astype(layers_cache.dtype),
                    (index, 0, step.position, 0, 0),
                )
                for name, layers_cache in zip(("key", "value"), cache, strict=True)
            )
        )
        key, value = (jax.lax.dynamic_index_in_dim(layers_cache, index, keepdims=False) for layers_cache in cache)
        mask = jnp.broadcast_to(step.mask[None], (rows, *step.mask.shape))
        context = attend(query, key, value, mask, _keep, step.bias, self.compute)
        hidden = hidden + dense(config.hidden_size, "output", width**-0.5)(context)

        inputs = ScaledNorm(config.layer_norm_eps, name="cross_norm")(hidden)
        query = heads("cross_query", query_deviation)
        # All rows of a source text are queries of one product, so that its keys and values are read once and not
        # copied.
        query = query.reshape(texts, -1, *query.shape[2:])
        context = attend(query, cross.keys, cross.values, step.source_mask, _keep, None, self.compute)
        context = context.reshape(rows, positions, -1)
        hidden = hidden + dense(config.hidden_size, "cross_output", width**-0.5)(context)

        inputs = ScaledNorm(config.layer_norm_eps, name="feed_forward_norm")(hidden)
        wide = ACTIVATIONS[config.hidden_act](dense(config.intermediate_size, "wide", config.hidden_size**-0.5)(inputs))
        if config.gated:
            wide = wide * dense(config.intermediate_size, "gate", config.hidden_size**-0.5)(inputs)
        hidden = hidden + dense(config.hidden_size, "narrow", config.intermediate_size**-0.5)(wide)
        return (hidden, cache), None


def _keep(weights: jax.Array) -> jax.Array:
    """Return attention weights unchanged, without dropout, because generators are not trained."""
    return weights


class T5Decoder(nn.Module):
    """Token ids and a source -> logits of the next tokens."""

    config: GeneratorConfig
    compute: Compute

    def setup(self) -> None:
        config, normal = self.config.decoder, nn.initializers.normal
        deviation = config.initializer_factor * config.hidden_size**-0.5
        self.position_bias = nn.Embed(config.buckets, config.num_heads, embedding_init=normal(deviation))
        self.final_norm = self.param("final_norm", nn.initializers.ones, (config.hidden_size,))
        if self.config.own_output:
            shape = config.vocab_size, config.hidden_size
            self.vocabulary = self.param("vocabulary", normal(config.initializer_factor), shape)
        scan_options: dict[str, Any] = {
            "variable_axes": {"params": 0},
            "split_rngs": {"params": True},
            "length": config.num_layers,
        }
        layers = nn.scan(T5DecoderLayer, in_axes=(0, 0, nn.broadcast), **scan_options)
        self.layers = layers(config, self.compute)
        self.source_layers = nn.scan(CrossProjection, in_axes=nn.broadcast, **scan_options)(config, self.compute)

    def read(self, states: Float[jax.Array, "B T H"], mask: Bool[jax.Array, "B T"]) -> Source:
        """Return the source for all steps of decoding, from the encoder's last states."""
        _, cross = self.source_layers(None, states.astype(self.compute.dtype))
        return Source(KeysValues(*cross), mask)

    def __call__(
        self,
        embeddings: Float[jax.Array, "R Q H"],
        table: Float[jax.Array, "vocabulary H"],
        cache: KeysValues,
        position: Int[jax.Array, ""],
        source: Source,
    ) -> tuple[Float[jax.Array, "R Q vocabulary"], KeysValues]:
        """Return the float32 logits after each new token, and the cache with the new tokens.

        Args:
            embeddings: word embeddings of the new tokens. R is a multiple of B; consecutive rows have the same source
              text.
            table: word table.
            cache: cache of the tokens before `position`.
            position: position of the first new token.
            source: source of B texts.
        """
        config = self.config.decoder
        slots = jnp.arange(cache.keys.shape[2])
        distances = position + jnp.arange(embeddings.shape[1])[:, None] - slots[None]  # [Q,U]
        buckets = distance_buckets(jnp.maximum(distances, 0), config.buckets, config.max_distance)
        bias = jnp.transpose(self.position_bias(buckets), (2, 0, 1))
        step = DecodingStep(position, distances >= 0, bias, source.mask)
        (hidden, cache), _ = self.layers((embeddings, cache), jnp.arange(config.num_layers), source.cross, step)
        hidden = scaled_norm(hidden, self.final_norm, config.layer_norm_eps)
        if self.config.scaled_output:
            hidden = hidden * config.hidden_size**-0.5
        output = self.vocabulary if self.config.own_output else table
        return product("rqh,vh->rqv", hidden, output, self.compute.dtype, jnp.float32), cache


class T5Generator(nn.Module):
    """T5 with its decoder. Call `read` once, then `decode` for every token. `__call__` is teacher forcing."""

    config: GeneratorConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        self.encoder = T5(self.config.encoder, self.compute)
        self.decoder = T5Decoder(self.config, self.compute)

    def read(self, tokens: Tokens) -> Source:
        """Return the source of a batch of texts."""
        return self.decoder.read(self.encoder(tokens, Selection(layers="last")).states[-1], tokens.mask)

    def decode(
        self, ids: Int[jax.Array, "R Q"], cache: KeysValues, position: Int[jax.Array, ""], source: Source
    ) -> tuple[Float[jax.Array, "R Q vocabulary"], KeysValues]:
        """Return the float32 logits after each new token, and the cache with the new tokens.

        Args:
            ids: new tokens.
            cache: cache of the tokens before `position`.
            position: position of the first new token.
            source: source of B texts. R is a multiple of B; consecutive rows have the same source text.
        """
        return self.decoder(self.encoder.word(ids), self.encoder.word_table, cache, position, source)

    def __call__(self, tokens: Tokens, ids: Int[jax.Array, "R Q"]) -> Float[jax.Array, "R Q vocabulary"]:
        """Return the logits after each token of `ids`, whose rows begin with `start_id`."""
        rows, length = ids.shape
        cache = empty_cache(self.config.decoder, rows, length, self.compute.dtype)
        return self.decode(ids, cache, jnp.int32(0), self.read(tokens))[0]
