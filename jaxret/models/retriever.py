"""Retriever = encoder(s) + head + pooling. `Retriever.encode` is the only way from tokens to vectors, in training,
validation, corpus encoding and search alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from jaxret.models.architectures import EncoderConfig, make_encoder
from jaxret.models.heads import HEADS, Side
from jaxret.models.keep import Keep
from jaxret.models.pooling import POOLINGS
from jaxret.models.pretrained import Params, load_pretrained, resolve, verify_weights
from jaxret.models.t5 import T5Config
from jaxret.types import Embeddings, HiddenStates, Tokens

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

    def setup(self) -> None:
        if self.tied:
            self.encoder = make_encoder(self.config, self.dtype, self.remat)
        else:
            self.query_encoder = make_encoder(self.config, self.dtype, self.remat)
            self.passage_encoder = make_encoder(self.config, self.dtype, self.remat)

    def __call__(self, tokens: Tokens, side: Side, train: bool) -> Embeddings:
        encoder = self.encoder if self.tied else getattr(self, f"{side}_encoder")
        hidden = encoder(tokens, self.head.keep(side), train)
        embeddings = self.head(hidden, side)
        # Everything after the encoder is float32: scores of bf16 vectors would have ties where there are none.
        embeddings = embeddings.replace(vectors=embeddings.vectors.astype(jnp.float32))
        if side == "passage":
            embeddings = self.pooling(embeddings, train)
        if self.normalize:
            squares = jnp.sum(embeddings.vectors**2, axis=-1, keepdims=True)
            embeddings = embeddings.replace(vectors=embeddings.vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24)))
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
        return self.module.config.hidden_size

    @property
    def vectors_per_passage(self) -> int:
        """V of an encoded passage at inference."""
        return self.module.pooling.inference_vectors()

    @property
    def longest(self) -> int:
        """Tokens that a text may have."""
        return self.module.config.longest

    def encode(
        self, params: Params, tokens: Tokens, side: Side, train: bool = False, dropout_key: jax.Array | None = None
    ) -> Embeddings:
        """Tokens [B,T] -> Embeddings [B,V,D] float32; V = 1 for queries. `dropout_key` is needed if `train`."""
        rngs = {"dropout": dropout_key} if train else None
        return self.module.apply({"params": params}, tokens, side, train, rngs=rngs)

    def hidden_states(self, params: Params, tokens: Tokens, side: Side) -> HiddenStates:
        """Every hidden state of the side's encoder [L+1,B,T,H]; for looking into a model, not for retrieval."""
        return self.module.apply({"params": params}, tokens, side, method=RetrieverModule.hidden_states)

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        keys = {"params": key, "dropout": key}
        return self.module.init(keys, tokens, tokens, method=RetrieverModule.both)["params"]


def build_retriever(config: ConfigDict, encoder: EncoderConfig) -> Retriever:
    """Config -> Retriever. Raises ValueError for unknown heads, tokens, poolings and dtypes, and for what the encoder
    cannot do."""
    if isinstance(encoder, T5Config):
        encoder = replace(encoder, normalize_intermediate=config.encoder.normalize_intermediate)
        if config.head.token == "cls":
            raise ValueError("head.token is 'cls', which T5 does not have; set head.token='mean'")
    elif config.encoder.normalize_intermediate:
        raise ValueError("encoder.normalize_intermediate is for T5; every layer of a BERT is normed already")

    def choose(table: dict[str, Any], key: str, name: str) -> Any:
        if name not in table:
            raise ValueError(f"{key} is {name!r}; it must be one of {', '.join(table)}")
        return table[name]

    head_options = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in config.head.items() if k != "name"}
    if config.head.name != "layers":
        head_options.pop("layers")
    head = choose(HEADS, "head.name", config.head.name)(num_layers=encoder.num_layers, **head_options)
    head.keep("query")  # an unknown head.token is an error now, not at the first batch
    pooling = choose(POOLINGS, "pooling", config.pooling)(num_vectors=head.vectors_per_passage())
    if config.pooling != "none" and head.vectors_per_passage() == 1:
        raise ValueError(f"pooling is {config.pooling!r}, but head {config.head.name!r} gives one vector: use 'none'")
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


def load_encoder(config: ConfigDict) -> tuple[Path, EncoderConfig, Params]:
    """Reads the encoder named by the config: its directory (for the tokenizer), its shapes, its weights."""
    directory = resolve(config.encoder.checkpoint, config.encoder.download)
    if config.encoder.sha256:
        verify_weights(directory, config.encoder.sha256)
    encoder, params = load_pretrained(directory, config.encoder.ignore)
    return directory, encoder, params


def with_pretrained(params: Params, encoder: Params) -> Params:
    """Replaces every encoder in `params` (concrete or abstract) by the pre-trained one."""
    encoders = {name: encoder for name in params if name.endswith("encoder")}
    found, expected = traverse_util.flatten_dict(encoders), traverse_util.flatten_dict({n: params[n] for n in encoders})
    for path, leaf in expected.items():
        if np.shape(found.get(path)) != tuple(leaf.shape):
            raise ValueError(f"{'/'.join(path)}: {np.shape(found.get(path))} loaded, {tuple(leaf.shape)} needed")
    return {**params, **encoders}
