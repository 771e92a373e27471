"""ModernBERT in Linen with every hidden state exposed: rotary positions, every third layer global and the others with a
local window, gated feed-forward, norms before each block and no biases. [Warner et al. 2024]

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
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.attention import (
    ACTIVATIONS,
    attend,
    require_length,
    rotate,
    split_heads,
    vocabulary_logits,
)
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import Compute, Dense, Dropout, dropout, dropout_rows
from jaxret.models.encoders.layout import Layout, Rows, repeat_first
from jaxret.models.encoders.stack import Stack
from jaxret.models.encoders.stored import DROPOUT, POSITIVE, SPREAD, Architecture, Classifier, Key, at_least, one_of
from jaxret.types import HiddenStates, Tokens

LACKS = {
    "fused_attention": "ModernBERT's layers see through windows of their own",
    "positioned_masks": "ModernBERT's embeddings hold no positions, so its [MASK]s are all alike",
}


@dataclass(frozen=True)
class ModernBertConfig:
    """Shapes and constants of a ModernBERT. Layer 0 and every `global_every`-th after it are global; in the others a
    token sees those at most `local_window` // 2 positions away."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    hidden_act: str = "gelu"
    norm_eps: float = 1e-5
    global_every: int = 3
    local_window: int = 128
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    embedding_dropout: float = 0.0
    initializer_range: float = 0.02
    normalize_intermediate: bool = False
    mlm_head: bool = False  # whether the head of masked language modelling is there too
    classifier_pooling: str = "cls"  # what a cross-encoder scores from; retrievers do not read it
    model_type: str = "modernbert"

    @property
    def longest(self) -> int:
        """Tokens that a text may have; there is no table that ends, but the model has not seen longer ones."""
        return self.max_positions

    @property
    def lacks(self) -> Mapping[str, str]:
        return LACKS


def centred_norm(hidden: Float[jax.Array, "*batch H"], scale: Float[jax.Array, " H"], eps: float) -> jax.Array:
    """Layer norm without a bias, computed in float32."""
    wide = hidden.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (normed * scale).astype(hidden.dtype)


class Norm(nn.Module):
    """`centred_norm` with a learned scale."""

    eps: float

    @nn.compact
    def __call__(self, hidden: Float[jax.Array, "*batch H"]) -> Float[jax.Array, "*batch H"]:
        return centred_norm(hidden, self.param("scale", nn.initializers.ones, (hidden.shape[-1],)), self.eps)


def linear(features: int, config: ModernBertConfig, compute: Compute, name: str, depth: int = 0) -> Dense:
    """A dense layer without a bias; what writes to the residual stream starts smaller, by the `depth` of the stack."""
    spread = config.initializer_range / (2 * depth) ** 0.5 if depth else config.initializer_range
    init = nn.initializers.truncated_normal(spread)
    return Dense(features, compute, init, use_bias=False, name=name)


class ModernBertEmbeddings(nn.Module):
    """Word embeddings, norm, dropout: positions come with the attention."""

    config: ModernBertConfig

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.truncated_normal(c.initializer_range)
        self.word = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=init)
        self.norm = Norm(c.norm_eps)

    @nn.compact
    def __call__(
        self, ids: Int[jax.Array, "N T"], layout: Layout, rows: Rows, leading: jax.Array | None = None
    ) -> Float[jax.Array, "R W H"]:
        """`leading` [n] (ids) or [n,H] (word embeddings) replaces the first token by n slots."""
        return Dropout(self.config.embedding_dropout)(self.norm(layout.embed(self.word, ids, leading)), rows)


class ModernBertMlmHead(nn.Module):
    """Hidden states -> logits over the vocabulary: dense, activation, norm, the word table transposed, and a bias."""

    config: ModernBertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self, hidden: Float[jax.Array, "*batch H"], table: Float[jax.Array, "vocabulary H"]
    ) -> Float[jax.Array, "*batch vocabulary"]:
        c = self.config
        transformed = ACTIVATIONS["gelu"](linear(c.hidden_size, c, self.compute, "dense", c.num_layers)(hidden))
        transformed = Norm(c.norm_eps, name="norm")(transformed)
        bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,))
        return vocabulary_logits(transformed, table, self.compute) + bias


class Attention(nn.Module):
    """Multi-head attention of a sequence, or of its first positions, to itself, with rotary positions."""

    config: ModernBertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B Q T"],
        rows: Rows,
        positions: Int[jax.Array, "*rows T"],
        rates: Float[jax.Array, " half"],
    ) -> Float[jax.Array, "B Q H"]:
        c, asked = self.config, mask.shape[1]
        drop = dropout(c.attention_dropout, rows)
        thirds = jnp.split(linear(3 * c.hidden_size, c, self.compute, "qkv")(hidden), 3, axis=-1)
        query, key, value = (split_heads(third, c.num_heads) for third in thirds)
        query = rotate(query[:, :asked], positions[..., :asked], rates) * (c.hidden_size // c.num_heads) ** -0.5
        mixed = attend(query, rotate(key, positions, rates), value, mask, drop, compute=self.compute)
        return drop(linear(c.hidden_size, c, self.compute, "output", c.num_layers)(mixed))


class ModernBertLayer(nn.Module):
    """One pre-norm layer; returns its output, at the `first` positions or all, and what `keep` selects of it. Its own:
    `own` [attention norm's scale, whether there is such a norm, window, rotary rates]."""

    config: ModernBertConfig
    compute: Compute
    keep: Keep

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "R W H"],
        own: dict[str, jax.Array],
        layout: Layout,
        rows: Rows,
        positions: Int[jax.Array, "*rows W"],
        final_scale: Float[jax.Array, " H"],
        first: int | None = None,
    ) -> tuple[Float[jax.Array, "R some H"], Float[jax.Array, "N K H"] | None]:
        c = self.config
        asked, rows = layout.asked(hidden, rows, first)
        near = jnp.abs(positions[..., : asked.shape[1], None] - positions[..., None, :]) <= own["reach"]
        seen = layout.seen if layout.seen.ndim == 3 else layout.seen[:, None, :]
        normed = jnp.where(own["normed"], centred_norm(hidden, own["scale"], c.norm_eps), hidden)
        attention = Attention(c, self.compute, name="attention")
        hidden = asked + attention(normed, seen & near, rows, positions, own["rates"])

        wide = linear(2 * c.intermediate_size, c, self.compute, "wide")(Norm(c.norm_eps, name="mlp_norm")(hidden))
        raised, gate = jnp.split(wide, 2, axis=-1)
        gated = Dropout(c.mlp_dropout)(ACTIVATIONS[c.hidden_act](raised) * gate, rows)
        hidden = hidden + linear(c.hidden_size, c, self.compute, "narrow", c.num_layers)(gated)
        if self.keep.layers == "last":
            return hidden, None
        shown = centred_norm(hidden, final_scale, c.norm_eps) if c.normalize_intermediate else hidden
        return hidden, self.keep.of(shown, layout)[0]


class LaterNorms(nn.Module):
    """The scales of the norms before attention: layer 0 has none, so they cannot lie with the layers' other parameters.
    Its row is a one that nothing learns."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self) -> Float[jax.Array, "L H"]:
        shape = (self.config.num_layers - 1, self.config.hidden_size)
        first = jnp.ones((1, shape[1]))
        if not shape[0]:  # no parameter without a number in it
            return first
        return jnp.concatenate([first, self.param("attention_norm", nn.initializers.ones, shape)])


class ModernBert(nn.Module):
    """Tokens -> HiddenStates."""

    config: ModernBertConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        c = self.config
        self.embeddings = ModernBertEmbeddings(c)
        self.later_layers = LaterNorms(c)
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,))
        if c.mlm_head:
            self.mlm_head = ModernBertMlmHead(c, self.compute)

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        return self.embeddings.word.embedding

    def embed(self, tokens: Tokens, train: bool) -> Float[jax.Array, "B T H"]:
        """What the first layer reads."""
        return self.embeddings(tokens.ids, Layout.of(tokens), dropout_rows(tokens, train))

    @nn.compact
    def __call__(
        self, tokens: Tokens, keep: Keep = Keep(), train: bool = False, leading: jax.Array | None = None
    ) -> HiddenStates:
        """Encodes a batch. Dropout needs a "dropout" rng when `train`. `leading`: see ModernBertEmbeddings; its n slots
        are all at position 0, the text follows from position 1, and the T of the states is then T - 1 + n.

        Raises ValueError if the batch is longer than the model's texts were.
        """
        c = self.config
        require_length(tokens.ids.shape[1], c.longest)
        layout = Layout.of(tokens, leading)
        rows = layout.rows(dropout_rows(tokens, train))
        embedded = self.embeddings(tokens.ids, layout, rows, leading)
        positions = jnp.arange(tokens.ids.shape[1])
        if leading is not None:
            positions = repeat_first(positions, len(leading))
        positions = layout.place(positions)
        layers = Stack(partial(ModernBertLayer, c, self.compute, keep), c.num_layers, self.compute, name="layers")
        own = {"scale": self.later_layers(), **layer_constants(c)}
        shared = layout, rows, positions, self.final_norm
        last, kept = layers(embedded, *shared, own=own, first=keep.first(layout.mask.shape[1]))
        last = centred_norm(last, self.final_norm, c.norm_eps)
        if self.is_initializing() and c.mlm_head:
            self.mlm_head(last[:, :1], self.word_table)
        return keep.collect(embedded, kept, last, layout)


def layer_constants(config: ModernBertConfig) -> dict[str, jax.Array]:
    """What differs from layer to layer but is not learned, each with a leading layer axis: whether there is a norm
    before attention, how far a token sees, and the rotary angles of one position."""
    layers = np.arange(config.num_layers)
    everywhere = layers % config.global_every == 0
    width = config.hidden_size // config.num_heads
    theta = np.where(everywhere, config.global_theta, config.local_theta)[:, None]
    return {
        "normed": jnp.asarray(layers > 0),
        "reach": jnp.asarray(np.where(everywhere, np.iinfo(np.int32).max, config.local_window // 2), jnp.int32),
        "rates": jnp.asarray(theta ** -(np.arange(0, width, 2) / width), jnp.float32),
    }


KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "intermediate_size": Key("intermediate_size"),
    "max_positions": Key("max_position_embeddings"),
    "hidden_act": Key("hidden_activation", one_of(*ACTIVATIONS), "gelu"),
    "norm_eps": Key("norm_eps", POSITIVE, 1e-5),
    "global_every": Key("global_attn_every_n_layers", default=3),
    "local_window": Key("local_attention", at_least(0), 128),
    "global_theta": Key("global_rope_theta", POSITIVE, 160_000.0),
    "local_theta": Key("local_rope_theta", POSITIVE, 10_000.0),
    "attention_dropout": Key("attention_dropout", DROPOUT, 0.0),
    "mlp_dropout": Key("mlp_dropout", DROPOUT, 0.0),
    "embedding_dropout": Key("embedding_dropout", DROPOUT, 0.0),
    "initializer_range": Key("initializer_range", SPREAD, 0.02),
    "classifier_pooling": Key("classifier_pooling", one_of("cls", "mean"), "cls"),
}
ONLY = {
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "rope_scaling": None,
}
NAMES = {
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
KINDS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def translate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`layer_types` and `rope_parameters`, as transformers 5 writes them, -> the keys of the first files."""
    older = dict(raw)
    types = raw.get("layer_types")
    if types is not None:
        layers = len(types) if isinstance(types, list) else 0
        every = next((i for i in range(1, layers) if types[i] == "full_attention"), max(layers, 1))
        expected = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
        if types != expected or layers != raw.get("num_hidden_layers"):
            raise ValueError(
                f"layer_types is {types}; it must name each of the num_hidden_layers layers, the first and every n-th "
                "after it 'full_attention', the others 'sliding_attention'"
            )
        older["global_attn_every_n_layers"] = every
    rope = raw.get("rope_parameters") or {}
    for kind, parameters in rope.items() if isinstance(rope, dict) else [("", rope)]:
        theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        if kind not in KINDS or parameters not in (
            {"rope_type": "default", "rope_theta": theta},
            {"rope_theta": theta},
        ):
            raise ValueError(
                f"rope_parameters is {rope}; only rope_type 'default' with a rope_theta is implemented, "
                f"for each of {' and '.join(KINDS)}"
            )
        older[KINDS[kind]] = theta
    return older


def check(config: ModernBertConfig) -> Iterator[tuple[str, str]]:
    if config.hidden_size % (2 * config.num_heads):
        yield "num_heads", f"divide the hidden size, {config.hidden_size}, into heads of an even size"


ARCHITECTURE = Architecture(
    "modernbert",
    ModernBertConfig,
    ModernBert,
    KEYS,
    lambda _: NAMES,
    class_name="ModernBertModel",
    prefix="model.",
    only=ONLY,
    translate=translate,
    check=check,
    # Their defaults are ids of one vocabulary, and errors in a smaller one.
    extra=dict.fromkeys(f"{token}_token_id" for token in ("pad", "bos", "eos", "cls", "sep")),
    mlm_head=ModernBertMlmHead,
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
