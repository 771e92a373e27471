"""Retriever = encoder(s) + head + pooling. `Retriever.encode` is the only way from tokens to vectors, in training,
validation, corpus encoding and search alike."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from jaxret.models.encoders.architectures import EncoderConfig, make_encoder, read_config
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.pretrained import Params, load_pretrained, resolve, verify_weights
from jaxret.models.encoders.t5 import T5Config
from jaxret.models.heads import HEADS
from jaxret.models.heads.head import Side, Text
from jaxret.models.pooling import POOLINGS
from jaxret.types import Embeddings, HiddenStates, Tokens

NOT_T5 = {
    "viewers": "viewers take the place of [CLS] at position 0, and T5 has neither",
    "implicit": "its reconstructor begins with [MASK] tokens, which T5 does not have",
    "lexical": "it has no head of masked language modelling; set head.mlm=False",
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class RetrieverModule(nn.Module):
    """The parameters' tree: `encoder` (tied) or `query_encoder` and `passage_encoder`, then `head` and `pooling`."""

    config: EncoderConfig
    dtype: Any
    remat: bool
    tied: bool
    head: nn.Module
    pooling: nn.Module
    normalize: bool
    pooled: bool = True

    def setup(self) -> None:
        if self.tied:
            self.encoder = make_encoder(self.config, self.dtype, self.remat)
        else:
            self.query_encoder = make_encoder(self.config, self.dtype, self.remat)
            self.passage_encoder = make_encoder(self.config, self.dtype, self.remat)
            self.query_head, self.passage_head = self.head.clone(), self.head.clone()

    def __call__(self, tokens: Tokens, side: Side, train: bool, labels: jax.Array | None = None) -> Embeddings:
        encoder = self.encoder if self.tied else getattr(self, f"{side}_encoder")
        head = self.head if self.tied else getattr(self, f"{side}_head")
        leading = {"leading": head.leading(side)} if hasattr(head, "leading") else {}
        hidden = encoder(tokens, head.keep(side), train, **leading)
        embeddings = head(hidden, Text(side, tokens, encoder, train, labels))
        # Everything after the encoder is float32: scores of bf16 vectors would have ties where there are none.
        embeddings = replace(embeddings, vectors=embeddings.vectors.astype(jnp.float32))
        if side == "passage" and self.pooled:
            embeddings = self.pooling(embeddings, train)
        if self.normalize:
            squares = jnp.sum(embeddings.vectors**2, axis=-1, keepdims=True)
            embeddings = replace(embeddings, vectors=embeddings.vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24)))
        return embeddings

    def hidden_states(self, tokens: Tokens, side: Side) -> HiddenStates:
        encoder = self.encoder if self.tied else getattr(self, f"{side}_encoder")
        return encoder(tokens, Keep())

    def both(self, queries: Tokens, passages: Tokens) -> tuple[Embeddings, Embeddings]:
        """Touches every parameter once; used to initialise."""
        return self(queries, "query", True), self(passages, "passage", True)


@dataclass(frozen=True)
class Retriever:
    """A retrieval family: how text becomes vectors. Holds no parameters."""

    module: RetrieverModule

    @property
    def dimension(self) -> int:
        """D, the size of one vector."""
        return self.module.head.dimension(self.module.config.hidden_size)

    @property
    def vectors_per_passage(self) -> int | None:
        """V of an encoded passage at inference; None: one for each of its tokens."""
        return self.module.pooling.inference_vectors() if self.module.pooled else self.module.head.vectors_per_passage()

    @property
    def late_interaction(self) -> bool:
        """Whether a query has a vector for each of its tokens, and its score is a sum over them."""
        return getattr(self.module.head, "late_interaction", False)

    def unpooled(self) -> Retriever:
        """The same retriever with a passage's vectors as the head gives them; for looking at which one wins."""
        return Retriever(self.module.clone(pooled=False))

    def vector_counts(self, lengths: np.ndarray, side: Side) -> np.ndarray:
        """How many vectors texts of `lengths` tokens have at inference."""
        if (side == "query" and self.late_interaction) or (side == "passage" and self.vectors_per_passage is None):
            return lengths + self.module.head.keep(side).mean
        return np.full(len(lengths), 1 if side == "query" else self.vectors_per_passage)

    @property
    def longest(self) -> int:
        """Tokens that a text may have."""
        return self.module.config.longest

    def encode(
        self,
        params: Params,
        tokens: Tokens,
        side: Side,
        train: bool = False,
        dropout_key: jax.Array | None = None,
        labels: jax.Array | None = None,
    ) -> Embeddings:
        """Tokens [B,T] -> Embeddings [B,V,D] float32; V = 1 for queries, except under late interaction. `dropout_key`
        is needed if `train`; `labels` are pseudo-queries [B,U], for heads that learn from them."""
        rngs = {"dropout": dropout_key} if train else None
        return self.module.apply({"params": params}, tokens, side, train, labels, rngs=rngs)

    def hidden_states(self, params: Params, tokens: Tokens, side: Side) -> HiddenStates:
        """Every hidden state of the side's encoder [L+1,B,T,H]; for looking into a model, not for retrieval."""
        return self.module.apply({"params": params}, tokens, side, method=RetrieverModule.hidden_states)

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        keys = {"params": key, "dropout": key}
        return self.module.init(keys, tokens, tokens, method=RetrieverModule.both)["params"]


def encoder_config(config: ConfigDict, directory: Path) -> EncoderConfig:
    """The encoder that `config` takes from a Hugging Face directory: all of it, or its first layers, perhaps with the
    MLM head. Raises ValueError for what this encoder cannot do."""
    encoder, changes = read_config(directory), {}
    if config.encoder.layers:
        if not 0 < config.encoder.layers <= encoder.num_layers:
            raise ValueError(
                f"encoder.layers is {config.encoder.layers}; the encoder in {directory} has {encoder.num_layers}"
            )
        changes["num_layers"] = config.encoder.layers
    normalize = config.encoder.normalize_intermediate
    if isinstance(encoder, T5Config):
        changes["normalize_intermediate"] = normalize
    else:
        changes["mlm_head"] = config.head.name == "lexical" and config.head.mlm
    return replace(encoder, **changes)


def build_retriever(config: ConfigDict, encoder: EncoderConfig) -> Retriever:
    """Config -> Retriever. Raises ValueError for unknown heads, tokens, poolings and dtypes, and for combinations that
    mean nothing."""

    def choose(table: dict[str, Any], key: str, name: str) -> Any:
        if name not in table:
            raise ValueError(f"{key} is {name!r}; it must be one of {', '.join(table)}")
        return table[name]

    head_class = choose(HEADS, "head.name", config.head.name)
    if isinstance(encoder, T5Config):
        if config.head.name in ("viewers", "implicit") or (config.head.name == "lexical" and config.head.mlm):
            raise ValueError(f"head.name is {config.head.name!r}, which T5 cannot have: {NOT_T5[config.head.name]}")
        if config.head.token == "cls":
            raise ValueError("head.token is 'cls', which T5 does not have; set head.token='mean'")
    options = {key: tuple(value) if isinstance(value, list | tuple) else value for key, value in config.head.items()}
    options |= {"num_layers": encoder.num_layers, "hidden_size": encoder.hidden_size}
    head = head_class(**{field.name: options[field.name] for field in fields(head_class) if field.name in options})
    if config.head.name == "viewers" and config.head.first_viewer_id + config.head.count > encoder.vocab_size:
        raise ValueError(
            f"head.first_viewer_id is {config.head.first_viewer_id} and head.count {config.head.count}, but the "
            f"vocabulary has {encoder.vocab_size} words; -1 gives viewers a table of their own"
        )
    vectors = head.vectors_per_passage()
    pooling_class = choose(POOLINGS, "pooling", config.pooling)
    check_pooling(config, vectors)
    pooling = pooling_class(num_vectors=vectors)
    module = RetrieverModule(
        config=encoder,
        dtype=choose(DTYPES, "encoder.dtype", config.encoder.dtype),
        remat=config.encoder.remat,
        tied=config.encoder.tied,
        head=head,
        pooling=pooling,
        normalize=config.normalize,
    )
    return Retriever(module)


def check_pooling(config: ConfigDict, vectors: int | None) -> None:
    """Raises ValueError for a pooling that a head's vectors cannot have."""
    if config.pooling == "none":
        return
    if vectors == 1:
        raise ValueError(f"pooling is {config.pooling!r}, but head {config.head.name!r} gives one vector: use 'none'")
    if config.head.name == "viewers":
        raise ValueError(f"pooling is {config.pooling!r}; MVR keeps every viewer's vector: use 'none'")
    if vectors is None and config.pooling == "scalar_mix":
        raise ValueError(
            f"pooling is 'scalar_mix', but head {config.head.name!r} has a vector for every token, so there is no "
            "fixed number of weights: use none, average or self_contrastive"
        )
    if vectors is None and config.head.late_interaction:
        raise ValueError(f"pooling is {config.pooling!r}; late interaction needs every token's vector: use 'none'")


def load_encoder(config: ConfigDict) -> tuple[Path, EncoderConfig, Params]:
    """Reads the encoder named by the config: its directory (for the tokenizer), its shapes, its weights."""
    directory = resolve(config.encoder.checkpoint, config.encoder.download)
    if config.encoder.sha256:
        verify_weights(directory, config.encoder.sha256)
    encoder, params = load_pretrained(
        directory, config.encoder.ignore, encoder_config(config, directory), config.seed.init
    )
    return directory, encoder, params


def with_pretrained(params: Params, encoder: Params) -> Params:
    """Replaces every encoder in `params` (concrete or abstract) by the pre-trained one."""
    encoders = {name: encoder for name in params if name.endswith("encoder")}
    found, expected = traverse_util.flatten_dict(encoders), traverse_util.flatten_dict({n: params[n] for n in encoders})
    for path, leaf in expected.items():
        if np.shape(found.get(path)) != tuple(leaf.shape):
            raise ValueError(f"{'/'.join(path)}: {np.shape(found.get(path))} loaded, {tuple(leaf.shape)} needed")
    return {**params, **encoders}
