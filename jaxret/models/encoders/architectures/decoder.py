"""Language models in Linen with every hidden state exposed: Llama, Mistral, Qwen3 (files in llama.py), Gemma 3
(gemma3.py).

They are decoders: a token attends to itself and to the tokens before it, unless `causal` is off. They have rotary
positions, groups of heads that share keys and values, RMS norms before each block, and a gated feed-forward network.
Qwen3 and Gemma norm queries and keys. Gemma also norms the result of each block, scales embeddings, and has windows in
most layers.

As in transformers, state 0 is the embedding output, states 1 to L-1 are the raw residual stream after each layer, and
state L has the final norm. `normalize_intermediate` gives every layer's output the final norm instead, so that layers
can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxret.models.encoders.attention import ACTIVATIONS, attend, require_length, rotate, split_heads
from jaxret.models.encoders.layers import Compute, Dense, Dropout, ScaledNorm, scaled_norm
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import Stack
from jaxret.models.encoders.stored import DROPOUT, LAYER_COUNT, POSITIVE, SPREAD, one_of, stored_field
from jaxret.models.encoders.window import FAR, WindowMask
from jaxret.types import HiddenStates, Tokens

DECODER_LACKS = {
    "cls": "a language model has no [CLS]",
    "prefix_tokens": "a language model has no [CLS] to replace",
    "mlm_head": "a language model has no head of masked language modelling",
    "positioned_masks": "a language model has no [MASK], and its embeddings hold no positions",
}
CAUSAL_LACKS = {"leading_tokens": "its first tokens do not see the text after them (encoder.direction)"}
Number = int | float  # config.json may have either
GATES = ACTIVATIONS | {"silu": jax.nn.silu}


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a language model. `head_size` x `num_heads` need not be `hidden_size`."""

    vocab_size: int = stored_field("vocab_size")  # rows of the table of words
    hidden_size: int = stored_field("hidden_size")  # width of hidden states
    num_layers: int = stored_field("num_hidden_layers", LAYER_COUNT)  # layers above the embeddings
    num_heads: int = stored_field("num_attention_heads")  # heads of attention in a layer
    # heads of keys and values; each serves num_heads / num_kv_heads query heads
    num_kv_heads: int = stored_field("num_key_value_heads")
    head_size: int = stored_field("head_dim")  # width of a head
    intermediate_size: int = stored_field("intermediate_size")  # width of the feed-forward network
    max_positions: int = stored_field("max_position_embeddings")  # longest input, in tokens
    hidden_act: str = stored_field("hidden_act", one_of(*GATES), "silu")  # activation of the feed-forward network
    norm_eps: Number = stored_field("rms_norm_eps", POSITIVE, 1e-6)  # added to the mean square in norms
    attention_bias: bool = False  # whether the dense layers of attention have biases
    mlp_bias: bool = False  # whether the dense layers of the feed-forward network have biases
    # base of the rotary rates, theta ** -(2i / head_size)
    theta: Number = stored_field("rope_theta", POSITIVE, 10_000.0)
    local_theta: Number = 0.0  # theta of layers with a window; 0: the same theta
    # scaling of theta's rates: default (none), linear or llama3
    rope_type: str = stored_field("rope_type", one_of("default", "linear", "llama3"), "default")
    rope_factor: Number = stored_field("factor", POSITIVE, 1.0)  # for linear and llama3: divisor of the scaled rates
    # for llama3: rates of wavelengths above rope_original / rope_low are scaled
    rope_low: Number = stored_field("low_freq_factor", POSITIVE, 1.0)
    # for llama3: rates of wavelengths below rope_original / rope_high are not scaled
    rope_high: Number = stored_field("high_freq_factor", POSITIVE, 4.0)
    # for llama3: longest text, in tokens, before the extension to longer texts
    rope_original: int = stored_field("original_max_position_embeddings", default=8192)
    window: int = 0  # tokens that a token attends to in layers with a window; 0: no layer has one
    first_window: int = 0  # the first layer with a window
    global_every: int = 0  # every n-th layer has no window; 0: all layers from first_window on have one
    query_scalar: Number = 0.0  # scores are divided by its square root; 0: by the square root of head_size
    # whether a token attends only to itself and those before it
    causal: bool = stored_field("is_causal", one_of(False, True), True)
    attention_dropout: Number = stored_field("attention_dropout", DROPOUT, 0.0)  # rate for attention weights
    initializer_range: Number = stored_field("initializer_range", SPREAD, 0.02)  # standard deviation of new parameters
    normalize_intermediate: bool = False  # whether intermediate states get the final norm
    model_type: str = "llama"  # name of the architecture in config.json

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text: the encoder was not trained on longer texts."""
        return self.max_positions

    @property
    def lacks(self) -> Mapping[str, str]:
        return DECODER_LACKS | CAUSAL_LACKS if self.causal else DECODER_LACKS

    @property
    def gemma(self) -> bool:
        """Whether this is Gemma. Its norms multiply by 1 + weight, and one follows each block, too. Embeddings are
        multiplied by the square root of the hidden size. Without `causal`, half of a window is on each side."""
        return self.model_type.startswith("gemma")

    @property
    def norms_queries(self) -> bool:
        """Whether the queries and keys of each head are normed before their rotation."""
        return self.gemma or self.model_type == "qwen3"

    @property
    def norm_offset(self) -> float:
        """Number that is added to the weights of norms."""
        return 1.0 if self.gemma else 0.0


class DecoderAttention(nn.Module):
    """Attention of a sequence to itself, with rotary positions. Groups of query heads share a head of keys and
    values."""

    config: DecoderConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B T H"],
        mask: WindowMask,
        positions: Int[jax.Array, "*rows T"],
        rates: Float[jax.Array, " half"],
        layout: TokenLayout,
    ) -> Float[jax.Array, "B T H"]:
        """Return the attention of all positions.

        Args:
            hidden: states of all positions.
            mask: keys that each query attends to.
            positions: positions of the tokens in their texts.
            rates: rotary angle per position, for each pair of dimensions.
            layout: layout of the tokens, for dropout.
        """
        config = self.config
        dense = partial(
            decoder_dense, config=config, compute=self.compute, use_bias=config.attention_bias, layout=layout
        )

        def heads(name: str, count: int, normed: bool = False) -> Float[jax.Array, "B T heads width"]:
            flat = dense(count * config.head_size, name=name, part="columns")(hidden)
            split = split_heads(flat, flat.shape[-1] // config.head_size)  # the heads of this device
            return decoder_norm(config, f"{name}_norm")(split) if normed else split

        query = rotate(heads("query", config.num_heads, config.norms_queries), positions, rates)
        key = rotate(heads("key", config.num_kv_heads, config.norms_queries), positions, rates)
        query = query * (config.query_scalar or config.head_size) ** -0.5
        drop = Dropout(config.attention_dropout, layout)
        context = attend(query, key, heads("value", config.num_kv_heads), mask, drop, compute=self.compute)
        return dense(config.hidden_size, name="output", part="rows")(context)


def decoder_dense(
    features: int, config: DecoderConfig, compute: Compute, use_bias: bool, layout: TokenLayout, name: str, part: str
) -> Dense:
    """Return a dense layer with a language model's initial weights.

    Args:
        features: size of the output.
        config: the encoder's config.
        compute: how the encoder is computed.
        use_bias: whether the layer has a bias.
        layout: layout of the input, for dropout of adapters.
        name: name of the parameters.
        part: part of the kernel that a device holds (`Dense.part`).
    """
    init = nn.initializers.normal(config.initializer_range)
    return Dense(features, compute, init, use_bias=use_bias, layout=layout, part=part, name=name)


def decoder_norm(config: DecoderConfig, name: str) -> ScaledNorm:
    return ScaledNorm(config.norm_eps, offset=config.norm_offset, name=name)


class LanguageModelLayer(nn.Module):
    """A pre-norm layer. It returns its output and its selected states."""

    config: DecoderConfig
    compute: Compute
    selection: Selection

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "R W H"],
        constants: dict[str, jax.Array],
        layout: TokenLayout,
        positions: Int[jax.Array, "*rows W"],
        final_scale: Float[jax.Array, " H"],
    ) -> tuple[Float[jax.Array, "R W H"], Float[jax.Array, "N K H"] | None]:
        """Return the layer's output and its selected states.

        Args:
            hidden: output of the layer below.
            constants: row of `decoder_constants` for this layer.
            positions: positions of the tokens in their texts.
            final_scale: scale of the norm after the last layer.
        """
        config = self.config
        dense = partial(decoder_dense, config=config, compute=self.compute, use_bias=config.mlp_bias, layout=layout)
        bounds = constants["backward"], constants["forward"]
        mask = WindowMask(layout.attention_mask, positions, *bounds, choices=tuple(sorted({*layer_windows(config)})))

        inputs = self.compute.enter_parts(decoder_norm(config, "attention_norm")(hidden))
        attention = DecoderAttention(config, self.compute, name="attention")
        context = attention(inputs, mask, positions, constants["rates"], layout)
        hidden = hidden + (decoder_norm(config, "attention_output_norm")(context) if config.gemma else context)

        inputs = self.compute.enter_parts(decoder_norm(config, "mlp_norm")(hidden))
        gate = GATES[config.hidden_act](dense(config.intermediate_size, name="gate", part="columns")(inputs))
        wide = dense(config.intermediate_size, name="wide", part="columns")(inputs)
        narrow = dense(config.hidden_size, name="narrow", part="rows")(gate * wide)
        hidden = hidden + (decoder_norm(config, "mlp_output_norm")(narrow) if config.gemma else narrow)
        if self.selection.layers == "last":
            return hidden, None
        states = scaled_norm(hidden, final_scale, config.norm_eps) if config.normalize_intermediate else hidden
        return hidden, self.selection.select(states, layout)[0]


class Decoder(nn.Module):
    """Tokens -> HiddenStates."""

    config: DecoderConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        config = self.config
        init = nn.initializers.normal(config.initializer_range)
        self.word = nn.Embed(config.vocab_size, config.hidden_size, embedding_init=init)
        ones = nn.initializers.constant(1.0 - config.norm_offset)
        self.final_norm = self.param("final_norm", ones, (config.hidden_size,))

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        return self.word.embedding

    @nn.compact
    def __call__(
        self, tokens: Tokens, selection: Selection = Selection(), train: bool = False, prefix: jax.Array | None = None
    ) -> HiddenStates:
        if prefix is not None:
            raise ValueError(f"prefix tokens are not supported: {DECODER_LACKS['prefix_tokens']}")
        config = self.config
        require_length(tokens.ids.shape[1], config.longest)
        layout = TokenLayout.of(tokens, train)
        embeddings = layout.embed(self.word, tokens.ids, None)
        if config.gemma:
            embeddings = embeddings * config.hidden_size**0.5
        positions = layout.arrange(jnp.arange(tokens.ids.shape[1]))
        final_scale = config.norm_offset + self.final_norm
        make_layer = partial(LanguageModelLayer, config, self.compute, selection)
        layers = Stack(make_layer, config.num_layers, self.compute, name="layers")
        last, intermediate = layers(embeddings, layout, positions, final_scale, per_layer=decoder_constants(config))
        last = scaled_norm(last, final_scale, config.norm_eps)
        return selection.collect(embeddings, intermediate, last, layout)


def decoder_constants(config: DecoderConfig) -> dict[str, jax.Array]:
    """Return the constants that may differ between layers, each with a leading layer axis.

    backward and forward: how far a token attends before and after itself, in positions. rates: rotary angles per
    position.
    """
    windows = layer_windows(config)
    local = rotary_rates(config.local_theta or config.theta, config.head_size)
    has_local = [window and config.local_theta > 0 for window in layers_with_window(config)]
    rates = np.where(np.array(has_local)[:, None], local, scaled_rates(config))
    return {
        "backward": jnp.asarray([backward for backward, _ in windows], jnp.int32),
        "forward": jnp.asarray([forward for _, forward in windows], jnp.int32),
        "rates": jnp.asarray(rates, jnp.float32),
    }


def layers_with_window(config: DecoderConfig) -> list[bool]:
    """Return for each layer whether its attention has a window, [L]."""
    layers = np.arange(config.num_layers)
    has_window = (layers >= config.first_window) & (config.window > 0)
    if config.global_every:
        has_window &= (layers + 1) % config.global_every != 0
    return [bool(window) for window in has_window]


def layer_windows(config: DecoderConfig) -> list[tuple[int, int]]:
    """Return (backward, forward) for each layer: how far a token attends before and after itself, in positions."""
    side = config.window // 2 if config.gemma else config.window
    local, no_bound = ((config.window - 1, 0), (FAR, 0)) if config.causal else ((side, side), (FAR, FAR))
    return [local if window else no_bound for window in layers_with_window(config)]


def rotary_rates(theta: Number, width: int) -> Float[np.ndarray, " half"]:
    """Return the rotary angles per position, float64."""
    return theta ** -(np.arange(0, width, 2) / width)


def scaled_rates(config: DecoderConfig) -> Float[np.ndarray, " half"]:
    """Return the rotary angles per position of `theta`, scaled for longer texts than in the first pre-training.

    linear: all angles are divided by the factor. llama3: only angles of long wavelengths are divided, those of short
    wavelengths stay, and between the two bounds the divisor changes smoothly.
    """
    rates = rotary_rates(config.theta, config.head_size)
    if config.rope_type == "default":
        return rates
    if config.rope_type == "linear":
        return rates / config.rope_factor
    turns = config.rope_original * rates / (2 * np.pi)  # full turns of an angle in a text of the first pre-training
    smooth = np.clip((turns - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    return rates * ((1 - smooth) / config.rope_factor + smooth)
