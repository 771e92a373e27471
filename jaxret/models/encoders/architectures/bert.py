"""BERT of any size in Linen with every hidden state exposed. MiniLM, DistilBERT and RoBERTa are built like it.

The layers are a `Stack`: their parameters are arrays with a leading layer axis. It returns a `Selection` of states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.attention import ACTIVATIONS, MlmHead, attend, require_length, split_heads
from jaxret.models.encoders.layers import Compute, Dense, Dropout
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
from jaxret.types import HiddenStates, Tokens


@dataclass(frozen=True)
class BertConfig:
    """Shapes and constants of a BERT."""

    vocab_size: int = stored_field("vocab_size")  # rows of the table of words
    hidden_size: int = stored_field("hidden_size")  # width of hidden states
    num_layers: int = stored_field("num_hidden_layers", LAYER_COUNT)  # layers above the embeddings
    num_heads: int = stored_field("num_attention_heads")  # heads of attention in a layer
    intermediate_size: int = stored_field("intermediate_size")  # width of the feed-forward network
    max_positions: int = stored_field("max_position_embeddings")  # rows of the table of positions
    type_vocab_size: int = stored_field("type_vocab_size", at_least(0), 2)  # 0 for DistilBERT, which has no token types
    hidden_act: str = stored_field("hidden_act", one_of(*ACTIVATIONS), "gelu")  # activation of the feed-forward network
    layer_norm_eps: float = stored_field("layer_norm_eps", POSITIVE, 1e-12)  # added to the variance in norms
    # rate for the embeddings and the result of each block
    hidden_dropout: float = stored_field("hidden_dropout_prob", DROPOUT, 0.1)
    attention_dropout: float = stored_field("attention_probs_dropout_prob", DROPOUT, 0.1)  # rate for attention weights
    initializer_range: float = stored_field("initializer_range", SPREAD, 0.02)  # standard deviation of new parameters
    first_position: int = 0  # 2 for RoBERTa, whose positions begin after the id of padding and do not count padding
    mlm_head: bool = False  # whether there is a head of masked language modelling
    model_type: str = "bert"  # name of the architecture in config.json

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text."""
        return self.max_positions - self.first_position

    @property
    def lacks(self) -> Mapping[str, str]:
        return {}


def bert_dense(
    features: int, config: BertConfig, compute: Compute, name: str, layout: TokenLayout | None = None
) -> Dense:
    """Return a dense layer with BERT's initial weights.

    Args:
        features: size of the output.
        config: the encoder's config.
        compute: how the encoder is computed.
        name: name of the parameters.
        layout: layout of the input, for dropout of adapters.
    """
    return Dense(features, compute, nn.initializers.normal(config.initializer_range), layout=layout, name=name)


def bert_norm(config: BertConfig, name: str | None = None) -> nn.LayerNorm:
    # use_fast_variance computes E[x^2] - E[x]^2, which loses digits that parity with torch needs.
    return nn.LayerNorm(epsilon=config.layer_norm_eps, dtype=jnp.float32, use_fast_variance=False, name=name)


class BertEmbeddings(nn.Module):
    """Word + position + type embeddings, layer norm, dropout. The token type is 1 in the second text of a pair, else 0,
    as in DPR and MLR."""

    config: BertConfig

    def setup(self) -> None:
        config = self.config
        init = nn.initializers.normal(config.initializer_range)

        def table(rows: int) -> nn.Embed:
            return nn.Embed(rows, config.hidden_size, embedding_init=init)

        self.word, self.position = table(config.vocab_size), table(config.max_positions)
        if config.type_vocab_size:
            self.type = table(config.type_vocab_size)
        self.norm = bert_norm(config)

    @nn.compact
    def __call__(
        self,
        ids: Int[jax.Array, "N T"],
        layout: TokenLayout,
        prefix: jax.Array | None = None,
        first: Int[jax.Array, " N"] | None = None,
    ) -> Float[jax.Array, "R W H"]:
        """Return the input of the first layer.

        Args:
            ids: padded token ids.
            layout: layout of the tokens, prefix tokens included.
            prefix: n tokens that replace the first and all have its position: ids [n] or word embeddings [n,H].
            first: length of the first text of each pair; None: there are no pairs.
        """
        positions = self.positions(ids)
        if prefix is not None:
            positions = repeat_first(positions, len(prefix))
        hidden = layout.embed(self.word, ids, prefix) + self.position(layout.arrange(positions))
        if self.config.type_vocab_size:
            types = jnp.zeros((1, 1), jnp.int32)
            if first is not None and self.config.type_vocab_size > 1:
                types = layout.arrange((jnp.arange(ids.shape[1])[None] >= first[:, None]).astype(jnp.int32))
            hidden = hidden + self.type(types)
        return Dropout(self.config.hidden_dropout, layout)(self.norm(hidden))

    def positions(self, ids: Int[jax.Array, "B T"]) -> Int[jax.Array, "#B T"]:
        """Return the row of the position table for each token. For RoBERTa, it depends on the ids, not on the mask:
        tokens with the id of padding have the row of padding and are not counted."""
        if not self.config.first_position:
            return jnp.arange(ids.shape[1])[None]
        padding = self.config.first_position - 1
        real = (ids != padding).astype(jnp.int32)
        return padding + jnp.cumsum(real, axis=1) * real


def bert_mlm_head(config: BertConfig, compute: Compute) -> MlmHead:
    dense = partial(bert_dense, config.hidden_size, config, compute, "dense")
    return MlmHead(compute, config.hidden_act, dense, partial(bert_norm, config, "norm"))


class BertAttention(nn.Module):
    """Multi-head attention of one sequence to another or to itself, without causal mask."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B Q H"],
        states: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"] | Bool[jax.Array, "B Q T"],
        layout: TokenLayout,
    ) -> Float[jax.Array, "B Q H"]:
        """Return the attention of queries from `hidden` to keys and values from `states`.

        Args:
            hidden: states that queries are computed from.
            states: states that keys and values are computed from.
            mask: keys to attend to: one mask for all queries, or one for each query.
            layout: layout of the queries, for dropout.
        """
        config = self.config

        def heads(name: str, x: jax.Array) -> jax.Array:
            return split_heads(bert_dense(config.hidden_size, config, self.compute, name, layout)(x), config.num_heads)

        query = heads("query", hidden) * config.head_size**-0.5
        drop = Dropout(config.attention_dropout, layout)
        context = attend(query, heads("key", states), heads("value", states), mask, drop, compute=self.compute)
        return bert_dense(config.hidden_size, config, self.compute, "output", layout)(context)


class PostNormLayer(nn.Module):
    """Blocks of layers like BERT's. Each block adds its result to its input and norms the sum."""

    config: BertConfig
    compute: Compute

    @nn.nowrap
    def attention_block(
        self,
        hidden: Float[jax.Array, "B Q H"],
        states: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"] | Bool[jax.Array, "B Q T"],
        drop: Dropout,
        name: str = "attention",
    ) -> Float[jax.Array, "B Q H"]:
        """Return norm(hidden + attention of `hidden` to `states`).

        Args:
            hidden: states that queries are computed from.
            states: states that keys and values are computed from.
            mask: keys to attend to: one mask for all queries, or one for each query.
            name: name of the attention's parameters; the norm's name is NAME_norm.
        """
        output = BertAttention(self.config, self.compute, name=name)(hidden, states, mask, drop.layout)
        return bert_norm(self.config, f"{name}_norm")(hidden + drop(output))

    @nn.nowrap
    def feed_forward_block(self, hidden: Float[jax.Array, "B Q H"], drop: Dropout) -> Float[jax.Array, "B Q H"]:
        """Return norm(hidden + feed-forward network of `hidden`)."""
        config = self.config
        dense = partial(bert_dense, config=config, compute=self.compute, layout=drop.layout)
        wide = ACTIVATIONS[config.hidden_act](dense(config.intermediate_size, name="intermediate")(hidden))
        narrow = dense(config.hidden_size, name="output")(wide)
        return bert_norm(config, "output_norm")(hidden + drop(narrow))


class BertLayer(PostNormLayer):
    """A layer of BERT. It returns its output, at the `first` positions or all, and its selected states."""

    selection: Selection

    @nn.compact
    def __call__(
        self, hidden: Float[jax.Array, "R W H"], layout: TokenLayout, first: int | None = None
    ) -> tuple[Float[jax.Array, "R queries H"], Float[jax.Array, "N K H"] | None]:
        queries, layout = layout.last_layer_queries(hidden, first)
        drop = Dropout(self.config.hidden_dropout, layout)
        states = self.attention_block(queries, hidden, layout.attention_mask, drop)
        hidden = self.feed_forward_block(states, drop)
        return hidden, self.selection.select(hidden, layout)[0] if self.selection.layers == "all" else None


class Bert(nn.Module):
    """Tokens -> HiddenStates."""

    config: BertConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        self.embeddings = BertEmbeddings(self.config)
        if self.config.mlm_head:
            self.mlm_head = bert_mlm_head(self.config, self.compute)

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        return self.embeddings.word.embedding

    def embed(self, tokens: Tokens, train: bool) -> Float[jax.Array, "B T H"]:
        return self.embeddings(tokens.ids, TokenLayout.of(tokens, train), first=tokens.first)

    @nn.compact
    def __call__(
        self, tokens: Tokens, selection: Selection = Selection(), train: bool = False, prefix: jax.Array | None = None
    ) -> HiddenStates:
        config = self.config
        require_length(tokens.ids.shape[1], config.longest)
        layout = TokenLayout.of(tokens, train, prefix)
        embeddings = self.embeddings(tokens.ids, layout, prefix, tokens.first)
        make_layer = partial(BertLayer, config, self.compute, selection)
        layers = Stack(make_layer, config.num_layers, self.compute, name="layers")
        last, intermediate = layers(embeddings, layout, first=selection.last_layer_positions(layout.mask.shape[1]))
        if self.is_initializing() and config.mlm_head:
            self.mlm_head(last[:, :1], self.word_table)
        return selection.collect(embeddings, intermediate, last, layout)


BERT_KEYS = stored_keys(BertConfig)
BERT_NAMES = {
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


def check_bert(config: BertConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, requirement) of each value that conflicts with another."""
    if config.hidden_size % config.num_heads:
        yield "num_heads", f"divide the hidden size, {config.hidden_size}"
    if config.longest < 1:
        yield "max_positions", f"be above {config.first_position}, the first position"


ARCHITECTURE = Architecture(
    "bert",
    BertConfig,
    Bert,
    BERT_KEYS,
    lambda _: (
        BERT_NAMES
        | {
            "mlm_head/dense": "cls.predictions.transform.dense",
            "mlm_head/norm": "cls.predictions.transform.LayerNorm",
            "mlm_head/bias": "cls.predictions.bias",
        }
    ),
    class_name="BertModel",
    prefix="bert.",
    only={"position_embedding_type": "absolute"},
    check=check_bert,
    buffers=("embeddings.position_ids",),  # 0, 1, 2, ...
    mlm_head=bert_mlm_head,
    mlm_class="BertForMaskedLM",
    mlm_output="cls.predictions.decoder.weight",
    classifier=Classifier("BertForSequenceClassification", "pooler.dense", "classifier", inside="pooler."),
)
