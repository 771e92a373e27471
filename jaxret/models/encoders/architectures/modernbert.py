"""ModernBERT (Warner et al. 2024) in Linen with every hidden state exposed.

It has rotary positions, a gated feed-forward network, norms before each block, and no biases. Every third layer is
global; the other layers have a local window.

As in transformers, state 0 is the embedding output, states 1 to L-1 are the raw residual stream after each layer, and
state L has the final norm. `normalize_intermediate` gives every layer's output the final norm instead, so that layers
can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxret.models.encoders.attention import ACTIVATIONS, MlmHead, attend, require_length, rotate, split_heads
from jaxret.models.encoders.layers import Compute, Dense, Dropout, ScaledNorm, scaled_norm
from jaxret.models.encoders.layout import TokenLayout, repeat_first
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import Stack
from jaxret.models.encoders.stored import (
    DROPOUT,
    LAYER_COUNT,
    POSITIVE,
    SPREAD,
    Architecture,
    Classifier,
    at_least,
    one_of,
    stored_field,
    stored_keys,
)
from jaxret.models.encoders.window import FAR, WindowMask
from jaxret.types import HiddenStates, Tokens

MODERNBERT_LACKS = {
    "positioned_masks": "ModernBERT's embeddings hold no positions, so its [MASK]s are all alike",
}


@dataclass(frozen=True)
class ModernBertConfig:
    """Shapes and constants of a ModernBERT."""

    vocab_size: int = stored_field("vocab_size")  # rows of the table of words
    hidden_size: int = stored_field("hidden_size")  # width of hidden states
    num_layers: int = stored_field("num_hidden_layers", LAYER_COUNT)  # layers above the embeddings
    num_heads: int = stored_field("num_attention_heads")  # heads of attention in a layer
    intermediate_size: int = stored_field("intermediate_size")  # width of the feed-forward network
    max_positions: int = stored_field("max_position_embeddings")  # longest input, in tokens
    # activation of the feed-forward network
    hidden_act: str = stored_field("hidden_activation", one_of(*ACTIVATIONS), "gelu")
    norm_eps: float = stored_field("norm_eps", POSITIVE, 1e-5)  # added to the variance in norms
    # layer 0 and every n-th layer after it are global
    global_every: int = stored_field("global_attn_every_n_layers", default=3)
    # tokens of a window in the other layers, half of them on each side
    local_window: int = stored_field("local_attention", at_least(0), 128)
    # base of the rotary rates in global layers
    global_theta: float = stored_field("global_rope_theta", POSITIVE, 160_000.0)
    # base of the rotary rates in the other layers
    local_theta: float = stored_field("local_rope_theta", POSITIVE, 10_000.0)
    attention_dropout: float = stored_field("attention_dropout", DROPOUT, 0.0)  # rate for attention weights
    mlp_dropout: float = stored_field("mlp_dropout", DROPOUT, 0.0)  # rate inside of feed-forward networks
    embedding_dropout: float = stored_field("embedding_dropout", DROPOUT, 0.0)  # rate for the embeddings
    initializer_range: float = stored_field("initializer_range", SPREAD, 0.02)  # standard deviation of new parameters
    normalize_intermediate: bool = False  # whether intermediate states get the final norm
    mlm_head: bool = False  # whether there is a head of masked language modelling
    # "cls" or "mean": the state that a cross-encoder scores; retrievers ignore it
    classifier_pooling: str = stored_field("classifier_pooling", one_of("cls", "mean"), "cls")
    model_type: str = "modernbert"  # name of the architecture in config.json

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text: the encoder was not trained on longer texts."""
        return self.max_positions

    @property
    def lacks(self) -> Mapping[str, str]:
        return MODERNBERT_LACKS


def modernbert_dense(
    features: int,
    config: ModernBertConfig,
    compute: Compute,
    name: str,
    residual: bool = False,
    layout: TokenLayout | None = None,
) -> Dense:
    """Return a dense layer without a bias.

    Args:
        features: size of the output.
        compute: options of the product.
        name: name of the parameters.
        residual: whether its result is added to the residual stream. Its initial values are then divided by
          sqrt(2 * layers).
        layout: layout of the input, for dropout of adapters.
    """
    deviation = config.initializer_range / ((2 * config.num_layers) ** 0.5 if residual else 1)
    init = nn.initializers.truncated_normal(deviation)
    return Dense(features, compute, init, use_bias=False, layout=layout, name=name)


class ModernBertEmbeddings(nn.Module):
    """Word embeddings, norm, dropout. Attention adds the positions."""

    config: ModernBertConfig

    def setup(self) -> None:
        config = self.config
        init = nn.initializers.truncated_normal(config.initializer_range)
        self.word = nn.Embed(config.vocab_size, config.hidden_size, embedding_init=init)
        self.norm = ScaledNorm(config.norm_eps, centred=True)

    @nn.compact
    def __call__(
        self, ids: Int[jax.Array, "N T"], layout: TokenLayout, prefix: jax.Array | None = None
    ) -> Float[jax.Array, "R W H"]:
        """Return the input of the first layer. `prefix` is described in `TokenLayout.embed`."""
        return Dropout(self.config.embedding_dropout, layout)(self.norm(layout.embed(self.word, ids, prefix)))


def modernbert_mlm_head(config: ModernBertConfig, compute: Compute) -> MlmHead:
    dense = partial(modernbert_dense, config.hidden_size, config, compute, "dense", residual=True)
    return MlmHead(compute, "gelu", dense, partial(ScaledNorm, config.norm_eps, centred=True, name="norm"))


class ModernBertAttention(nn.Module):
    """Multi-head attention of the first positions of a sequence to the sequence, with rotary positions."""

    config: ModernBertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B T H"],
        mask: WindowMask,
        positions: Int[jax.Array, "*rows T"],
        rates: Float[jax.Array, " half"],
        layout: TokenLayout,
        queries: int,
    ) -> Float[jax.Array, "B Q H"]:
        """Return the attention of the first positions.

        Args:
            hidden: states of all positions.
            mask: keys that each query attends to.
            positions: positions of the tokens in their texts.
            rates: rotary angle per position, for each pair of dimensions.
            layout: layout of the queries, for dropout.
            queries: number of first positions that are queries.
        """
        config = self.config
        drop = Dropout(config.attention_dropout, layout)
        dense = partial(modernbert_dense, config=config, compute=self.compute, layout=layout)
        thirds = jnp.split(dense(3 * config.hidden_size, name="qkv")(hidden), 3, axis=-1)
        query, key, value = (split_heads(third, config.num_heads) for third in thirds)
        query = rotate(query[:, :queries], positions[..., :queries], rates) * config.head_size**-0.5
        context = attend(query, rotate(key, positions, rates), value, mask, drop, compute=self.compute)
        return drop(dense(config.hidden_size, name="output", residual=True)(context))


class ModernBertLayer(nn.Module):
    """A pre-norm layer. It returns its output, at the `first` positions or all, and its selected states."""

    config: ModernBertConfig
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
        first: int | None = None,
    ) -> tuple[Float[jax.Array, "R queries H"], Float[jax.Array, "N K H"] | None]:
        """Return the layer's output and its selected states.

        Args:
            hidden: output of the layer below.
            constants: row of `layer_constants` for this layer, and the scale of its norm before attention.
            positions: positions of the tokens in their texts.
            final_scale: scale of the norm after the last layer.
            first: number of first positions to compute; None: all.
        """
        config = self.config
        queries, query_layout = layout.last_layer_queries(hidden, first)
        reach = constants["reach"]
        choices = tuple((n, n) for n in sorted({*layer_reaches(config)}))
        mask = WindowMask(layout.attention_mask, positions, reach, reach, choices)
        inputs = scaled_norm(hidden, constants["scale"], config.norm_eps, centred=True)
        inputs = jnp.where(constants["normed"], inputs, hidden)
        attention = ModernBertAttention(config, self.compute, name="attention")
        hidden = queries + attention(inputs, mask, positions, constants["rates"], query_layout, queries.shape[1])

        inputs = ScaledNorm(config.norm_eps, centred=True, name="mlp_norm")(hidden)
        dense = partial(modernbert_dense, config=config, compute=self.compute, layout=query_layout)
        wide, gate = jnp.split(dense(2 * config.intermediate_size, name="wide")(inputs), 2, axis=-1)
        activations = Dropout(config.mlp_dropout, query_layout)(ACTIVATIONS[config.hidden_act](wide) * gate)
        hidden = hidden + dense(config.hidden_size, name="narrow", residual=True)(activations)
        if self.selection.layers == "last":
            return hidden, None
        states = hidden
        if config.normalize_intermediate:
            states = scaled_norm(hidden, final_scale, config.norm_eps, centred=True)
        return hidden, self.selection.select(states, layout)[0]


class LaterNorms(nn.Module):
    """Scales of the norms before attention. They are not among the stacked parameters, because layer 0 has no such
    norm. Its row is a constant 1."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self) -> Float[jax.Array, "L H"]:
        shape = (self.config.num_layers - 1, self.config.hidden_size)
        first = jnp.ones((1, shape[1]))
        if not shape[0]:  # an encoder of one layer has no such parameter
            return first
        return jnp.concatenate([first, self.param("attention_norm", nn.initializers.ones, shape)])


class ModernBert(nn.Module):
    """Tokens -> HiddenStates."""

    config: ModernBertConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        config = self.config
        self.embeddings = ModernBertEmbeddings(config)
        self.later_layers = LaterNorms(config)
        self.final_norm = self.param("final_norm", nn.initializers.ones, (config.hidden_size,))
        if config.mlm_head:
            self.mlm_head = modernbert_mlm_head(config, self.compute)

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        return self.embeddings.word.embedding

    @nn.compact
    def __call__(
        self, tokens: Tokens, selection: Selection = Selection(), train: bool = False, prefix: jax.Array | None = None
    ) -> HiddenStates:
        config = self.config
        require_length(tokens.ids.shape[1], config.longest)
        layout = TokenLayout.of(tokens, train, prefix)
        embeddings = self.embeddings(tokens.ids, layout, prefix)
        positions = jnp.arange(tokens.ids.shape[1])
        if prefix is not None:
            positions = repeat_first(positions, len(prefix))
        positions = layout.arrange(positions)
        make_layer = partial(ModernBertLayer, config, self.compute, selection)
        layers = Stack(make_layer, config.num_layers, self.compute, name="layers")
        constants = {"scale": self.later_layers(), **layer_constants(config)}
        first = selection.last_layer_positions(layout.mask.shape[1])
        last, intermediate = layers(embeddings, layout, positions, self.final_norm, per_layer=constants, first=first)
        last = scaled_norm(last, self.final_norm, config.norm_eps, centred=True)
        if self.is_initializing() and config.mlm_head:
            self.mlm_head(last[:, :1], self.word_table)
        return selection.collect(embeddings, intermediate, last, layout)


def layer_constants(config: ModernBertConfig) -> dict[str, jax.Array]:
    """Return the constants that differ between layers, each with a leading layer axis.

    normed: whether there is a norm before attention. reach: the largest distance of a key. rates: rotary angles per
    position.
    """
    layers = np.arange(config.num_layers)
    is_global = layers % config.global_every == 0
    width = config.head_size
    theta = np.where(is_global, config.global_theta, config.local_theta)[:, None]
    return {
        "normed": jnp.asarray(layers > 0),
        "reach": jnp.asarray(layer_reaches(config), jnp.int32),
        "rates": jnp.asarray(theta ** -(np.arange(0, width, 2) / width), jnp.float32),
    }


def layer_reaches(config: ModernBertConfig) -> list[int]:
    """Return the largest distance of a key from its query for each layer."""
    return [config.local_window // 2 if layer % config.global_every else FAR for layer in range(config.num_layers)]


MODERNBERT_ONLY = {
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "rope_scaling": None,
}
MODERNBERT_NAMES = {
    "embeddings/word": "embeddings.tok_embeddings",
    "embeddings/norm": "embeddings.norm",
    "later_layers/attention_norm": "layers.{}.attn_norm.weight",
    "layers/attention/qkv": "layers.{}.attn.Wqkv",
    "layers/attention/output": "layers.{}.attn.Wo",
    "layers/mlp_norm": "layers.{}.mlp_norm",
    "layers/wide": "layers.{}.mlp.Wi",
    "layers/narrow": "layers.{}.mlp.Wo",
    "final_norm": "final_norm.weight",
    "mlm_head/dense": "head.dense",
    "mlm_head/norm": "head.norm",
    "mlm_head/bias": "decoder.bias",
}
LAYER_KINDS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def translate_modernbert(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with `layer_types` and `rope_parameters`, which transformers 5 writes, translated to older
    keys. Raises ValueError for layers or rotary positions that are not implemented."""
    older = dict(raw)
    types = raw.get("layer_types")
    if types is not None:
        layers = len(types) if isinstance(types, list) else 0
        period = next((i for i in range(1, layers) if types[i] == "full_attention"), max(layers, 1))
        expected = ["sliding_attention" if i % period else "full_attention" for i in range(layers)]
        if types != expected or layers != raw.get("num_hidden_layers"):
            raise ValueError(
                f"layer_types is {types}; it must have an entry for each of the num_hidden_layers layers: the first "
                "and every n-th after it are 'full_attention', all other entries are 'sliding_attention'"
            )
        older["global_attn_every_n_layers"] = period
    rope = raw.get("rope_parameters") or {}
    for kind, parameters in rope.items() if isinstance(rope, dict) else [("", rope)]:
        theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        if kind not in LAYER_KINDS or parameters not in (
            {"rope_type": "default", "rope_theta": theta},
            {"rope_theta": theta},
        ):
            raise ValueError(
                f"rope_parameters is {rope}; only rope_type 'default' with a rope_theta is implemented, "
                f"for each of {' and '.join(LAYER_KINDS)}"
            )
        older[LAYER_KINDS[kind]] = theta
    return older


def check_modernbert(config: ModernBertConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, requirement) of each value that conflicts with another."""
    if config.hidden_size % (2 * config.num_heads):
        yield "num_heads", f"divide the hidden size, {config.hidden_size}, into heads of an even size"


ARCHITECTURE = Architecture(
    "modernbert",
    ModernBertConfig,
    ModernBert,
    stored_keys(ModernBertConfig),
    lambda _: MODERNBERT_NAMES,
    class_name="ModernBertModel",
    prefix="model.",
    only=MODERNBERT_ONLY,
    translate=translate_modernbert,
    check=check_modernbert,
    # transformers' default ids are out of range in smaller vocabularies.
    extra=dict.fromkeys(f"{token}_token_id" for token in ("pad", "bos", "eos", "cls", "sep")),
    mlm_head=modernbert_mlm_head,
    mlm_class="ModernBertForMaskedLM",
    mlm_output="decoder.weight",
    classifier=Classifier(
        "ModernBertForSequenceClassification",
        "head.dense",
        "classifier",
        activation="gelu",
        norm="head.norm",
        dense_bias=False,
    ),
)
