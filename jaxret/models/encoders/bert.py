"""BERT in Linen with every hidden state exposed (MiniLM, BERT of any size, and what is built like it).

Layers are a `Stack`: parameters of all lie in one array with a leading layer axis. `Keep` decides what leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.attention import (
    ACTIVATIONS,
    attend,
    require_length,
    split_heads,
    vocabulary_logits,
)
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import Compute, Dense, Dropout, dropout, dropout_rows
from jaxret.models.encoders.layout import Layout, Rows, repeat_first
from jaxret.models.encoders.stack import Stack
from jaxret.models.encoders.stored import DROPOUT, POSITIVE, SPREAD, Architecture, Classifier, Key, at_least, one_of
from jaxret.types import HiddenStates, Tokens


@dataclass(frozen=True)
class BertConfig:
    """Shapes and constants of a BERT. `type_vocab_size` is 0 for DistilBERT, which has no token types;
    `first_position` is 2 for RoBERTa, whose positions begin after the id of padding and do not count it."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02
    first_position: int = 0
    mlm_head: bool = False  # whether the head of masked language modelling is there too
    model_type: str = "bert"

    @property
    def longest(self) -> int:
        """Tokens that a text may have."""
        return self.max_positions - self.first_position

    @property
    def lacks(self) -> Mapping[str, str]:
        return {}


def dense(features: int, config: BertConfig, compute: Compute, name: str) -> Dense:
    return Dense(features, compute, nn.initializers.normal(config.initializer_range), name=name)


def layer_norm(config: BertConfig, name: str | None = None) -> nn.LayerNorm:
    # use_fast_variance computes E[x^2] - E[x]^2, which loses digits that parity with torch needs.
    return nn.LayerNorm(epsilon=config.layer_norm_eps, dtype=jnp.float32, use_fast_variance=False, name=name)


class BertEmbeddings(nn.Module):
    """Word + position + type embeddings, layer norm, dropout. Token types are zero everywhere, as in DPR and MLR, but
    for the second text of pairs."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(c.initializer_range)

        def table(rows: int) -> nn.Embed:
            return nn.Embed(rows, c.hidden_size, embedding_init=init)

        self.word, self.position = table(c.vocab_size), table(c.max_positions)
        if c.type_vocab_size:
            self.type = table(c.type_vocab_size)
        self.norm = layer_norm(c)

    @nn.compact
    def __call__(
        self,
        ids: Int[jax.Array, "N T"],
        layout: Layout,
        rows: Rows,
        leading: jax.Array | None = None,
        first: Int[jax.Array, " N"] | None = None,
    ) -> Float[jax.Array, "R W H"]:
        """first: tokens of the first text of each pair. `leading` [n] (ids) or [n,H] (word embeddings) replaces the
        first token by n slots, all at its position."""
        positions = self.positions(ids)
        if leading is not None:
            positions = repeat_first(positions, len(leading))
        hidden = layout.embed(self.word, ids, leading) + self.position(layout.place(positions))
        if self.config.type_vocab_size:
            types = jnp.zeros((1, 1), jnp.int32)
            if first is not None and self.config.type_vocab_size > 1:
                types = layout.place((jnp.arange(ids.shape[1])[None] >= first[:, None]).astype(jnp.int32))
            hidden = hidden + self.type(types)
        return Dropout(self.config.hidden_dropout)(self.norm(hidden), rows)

    def positions(self, ids: Int[jax.Array, "B T"]) -> Int[jax.Array, "#B T"]:
        """Rows of the position table. RoBERTa's follow from the ids, not from the mask: whatever has padding's id stays
        at padding's row and is not counted."""
        if not self.config.first_position:
            return jnp.arange(ids.shape[1])[None]
        padding = self.config.first_position - 1
        real = (ids != padding).astype(jnp.int32)
        return padding + jnp.cumsum(real, axis=1) * real


class MlmHead(nn.Module):
    """Hidden states -> logits over the vocabulary: dense, activation, norm, then the word table transposed, and a
    bias. [Devlin et al. 2019]"""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self, hidden: Float[jax.Array, "*batch H"], table: Float[jax.Array, "vocabulary H"]
    ) -> Float[jax.Array, "*batch vocabulary"]:
        c = self.config
        transformed = ACTIVATIONS[c.hidden_act](dense(c.hidden_size, c, self.compute, "dense")(hidden))
        transformed = layer_norm(c, "norm")(transformed)
        return vocabulary_logits(transformed, table, self.compute) + self.param(
            "bias", nn.initializers.zeros, (c.vocab_size,)
        )


class Attention(nn.Module):
    """Multi-head attention of one sequence to another, or to itself, in both directions."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B Q H"],
        states: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"] | Bool[jax.Array, "B Q T"],
        rows: Rows,
    ) -> Float[jax.Array, "B Q H"]:
        """Queries from `hidden`, keys and values from `states`, of which `mask` says which may be seen."""
        c = self.config

        def heads(name: str, x: jax.Array) -> jax.Array:
            return split_heads(dense(c.hidden_size, c, self.compute, name)(x), c.num_heads)

        query = heads("query", hidden) * (c.hidden_size // c.num_heads) ** -0.5
        drop = dropout(c.attention_dropout, rows)
        mixed = attend(query, heads("key", states), heads("value", states), mask, drop, compute=self.compute)
        return dense(c.hidden_size, c, self.compute, "output")(mixed)


class BertLayer(nn.Module):
    """One post-norm transformer layer; returns its output, at the `first` positions or all, and what `keep` selects of
    it."""

    config: BertConfig
    compute: Compute
    keep: Keep

    @nn.compact
    def __call__(
        self, hidden: Float[jax.Array, "R W H"], layout: Layout, rows: Rows, first: int | None = None
    ) -> tuple[Float[jax.Array, "R some H"], Float[jax.Array, "N K H"] | None]:
        c = self.config
        asked, rows = layout.asked(hidden, rows, first)
        drop = dropout(c.hidden_dropout, rows)
        attended = Attention(c, self.compute, name="attention")(asked, hidden, layout.seen, rows)
        hidden = layer_norm(c, "attention_norm")(asked + drop(attended))
        wide = ACTIVATIONS[c.hidden_act](dense(c.intermediate_size, c, self.compute, "intermediate")(hidden))
        narrow = dense(c.hidden_size, c, self.compute, "output")(wide)
        hidden = layer_norm(c, "output_norm")(hidden + drop(narrow))
        return hidden, self.keep.of(hidden, layout)[0] if self.keep.layers == "all" else None


class Bert(nn.Module):
    """Tokens -> HiddenStates."""

    config: BertConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        self.embeddings = BertEmbeddings(self.config)
        if self.config.mlm_head:
            self.mlm_head = MlmHead(self.config, self.compute)

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        return self.embeddings.word.embedding

    def embed(self, tokens: Tokens, train: bool) -> Float[jax.Array, "B T H"]:
        """What the first layer reads."""
        return self.embeddings(tokens.ids, Layout.of(tokens), dropout_rows(tokens, train), first=tokens.first)

    @nn.compact
    def __call__(
        self, tokens: Tokens, keep: Keep = Keep(), train: bool = False, leading: jax.Array | None = None
    ) -> HiddenStates:
        """Encodes a batch. Dropout needs a "dropout" rng when `train`. `leading`: see BertEmbeddings; the T of the
        states is then T - 1 + n.

        Raises ValueError if the batch is longer than the position table.
        """
        c = self.config
        require_length(tokens.ids.shape[1], c.longest)
        layout = Layout.of(tokens, leading)
        rows = layout.rows(dropout_rows(tokens, train))
        embedded = self.embeddings(tokens.ids, layout, rows, leading, tokens.first)
        layers = Stack(partial(BertLayer, c, self.compute, keep), c.num_layers, self.compute, name="layers")
        last, kept = layers(embedded, layout, rows, first=keep.first(layout.mask.shape[1]))
        if self.is_initializing() and c.mlm_head:
            self.mlm_head(last[:, :1], self.word_table)
        return keep.collect(embedded, kept, last, layout)


KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "intermediate_size": Key("intermediate_size"),
    "max_positions": Key("max_position_embeddings"),
    "type_vocab_size": Key("type_vocab_size", at_least(0), 2),
    "hidden_act": Key("hidden_act", one_of(*ACTIVATIONS), "gelu"),
    "layer_norm_eps": Key("layer_norm_eps", POSITIVE, 1e-12),
    "hidden_dropout": Key("hidden_dropout_prob", DROPOUT, 0.1),
    "attention_dropout": Key("attention_probs_dropout_prob", DROPOUT, 0.1),
    "initializer_range": Key("initializer_range", SPREAD, 0.02),
}
NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/type": "embeddings.token_type_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "layers/attention/query": "encoder.layer.{}.attention.self.query",
    "layers/attention/key": "encoder.layer.{}.attention.self.key",
    "layers/attention/value": "encoder.layer.{}.attention.self.value",
    "layers/attention/output": "encoder.layer.{}.attention.output.dense",
    "layers/attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers/intermediate": "encoder.layer.{}.intermediate.dense",
    "layers/output": "encoder.layer.{}.output.dense",
    "layers/output_norm": "encoder.layer.{}.output.LayerNorm",
}


def check(config: BertConfig) -> Iterator[tuple[str, str]]:
    if config.hidden_size % config.num_heads:
        yield "num_heads", f"divide the hidden size, {config.hidden_size}"
    if config.longest < 1:
        yield "max_positions", f"be above {config.first_position}: positions begin there"


ARCHITECTURE = Architecture(
    "bert",
    BertConfig,
    Bert,
    KEYS,
    lambda _: (
        NAMES
        | {
            "mlm_head/dense": "cls.predictions.transform.dense",
            "mlm_head/norm": "cls.predictions.transform.LayerNorm",
            "mlm_head/bias": "cls.predictions.bias",
        }
    ),
    class_name="BertModel",
    prefix="bert.",
    only={"position_embedding_type": "absolute"},
    check=check,
    buffers=("embeddings.position_ids",),  # 0, 1, 2, ...
    mlm_head=MlmHead,
    mlm_class="BertForMaskedLM",
    mlm_output="cls.predictions.decoder.weight",
    classifier=Classifier("BertForSequenceClassification", "pooler.dense", "classifier", inside="pooler."),
)
