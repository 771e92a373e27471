"""Retrieval models: encoder(s) + head + pooling. Training, validation, corpus encoding and search all compute vectors
with `RetrieverModel.encode`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from jaxret.data.tokens.prompts import read_prompts
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import EncoderConfig, make_encoder, read_config
from jaxret.models.encoders.fused import ATTENTION_PLATFORMS
from jaxret.models.encoders.layers import RECOMPUTE, Compute
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads import HEADS, make_head
from jaxret.models.heads.head import HeadInput, Side, VectorHead
from jaxret.models.model import LinenModel
from jaxret.models.pooling import POOLINGS
from jaxret.models.scoring import unit_length
from jaxret.types import Embeddings, HiddenStates, Params, Ragged, Tokens

DIRECTIONS = {"causal": True, "bidirectional": False}
COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class RetrieverModule(nn.Module):
    """The Linen module: one `encoder` if tied, else `query_encoder` and `passage_encoder`; then `head` and
    `pooling`."""

    config: EncoderConfig
    compute: Compute
    tied: bool
    head: VectorHead
    pooling: nn.Module
    normalize: bool
    pooled: bool = True
    skip_prompt: bool = False  # whether tokens of prompts, whose ids `TextTokenizer` marks, are left out of means

    def setup(self) -> None:
        if self.tied:
            self.encoder = make_encoder(self.config, self.compute)
        else:
            self.query_encoder = make_encoder(self.config, self.compute)
            self.passage_encoder = make_encoder(self.config, self.compute)
            self.query_head, self.passage_head = self.head.clone(), self.head.clone()

    def __call__(self, tokens: Tokens, side: Side, train: bool, labels: jax.Array | None = None) -> Embeddings:
        encoder, tokens = self._encoder(side), self._read_marks(tokens)
        head = self.head if self.tied else getattr(self, f"{side}_head")
        hidden = encoder(head.attention_tokens(tokens, side), head.selection(side), train, head.prefix_tokens(side))
        embeddings = head(hidden, HeadInput(side, replace(tokens, packing=None), encoder, train, labels))
        # Everything after the encoder is float32, because different scores of bfloat16 vectors would often be equal.
        embeddings = replace(embeddings, vectors=embeddings.vectors.astype(jnp.float32))
        if side == "passage" and self.pooled:
            embeddings = self.pooling(embeddings, train)
        if self.normalize:
            embeddings = replace(embeddings, vectors=unit_length(embeddings.vectors))
        return embeddings

    def _encoder(self, side: Side) -> Any:
        return self.encoder if self.tied else getattr(self, f"{side}_encoder")

    def hidden_states(self, tokens: Tokens, side: Side) -> HiddenStates:
        """Return the states of all layers and positions [L+1,B,T,H] of texts that are not packed, without dropout."""
        return self._encoder(side)(replace(self._read_marks(tokens), packing=None), Selection())

    def _read_marks(self, tokens: Tokens) -> Tokens:
        """Return tokens whose marked ids are replaced by the ids, with a mask of the tokens that were not marked."""
        if not self.skip_prompt:
            return tokens
        ids = jnp.where(tokens.ids < 0, ~tokens.ids, tokens.ids)
        return replace(tokens, ids=ids, mean_mask=tokens.mask & (tokens.ids >= 0))

    def encode_both_sides(self, queries: Tokens, passages: Tokens) -> tuple[Embeddings, Embeddings]:
        """Encode queries and passages, so that initialization makes every parameter."""
        return self(queries, "query", True), self(passages, "passage", True)


@dataclass(frozen=True)
class RetrieverModel(LinenModel):
    """A model that encodes queries and passages as vectors, without parameters."""

    module: RetrieverModule  # the Linen module, which returns vectors of full size
    cut: int = 0  # number of first dimensions of a vector that an embedder keeps; 0: all

    @property
    def dimension(self) -> int:
        """Return D, the size of a vector that an embedder returns."""
        return self.cut or self.module.head.dimension()

    @property
    def uncut(self) -> RetrieverModel:
        """Return this model with vectors of full size."""
        return replace(self, cut=0)

    def cut_problem(self) -> str:
        """Return the reason why a vector cannot be shortened to its first dimensions; "" if it can."""
        problem = self.module.head.cut_problem()
        return f"head {self.contract()['head']['name']!r} {problem}" if problem else ""

    def with_dimension(self, size: int, key: str) -> RetrieverModel:
        """Return this model with vectors of `size` dimensions; 0: all. Raises ValueError, naming `key`, for a size that
        is not possible."""
        full_size = self.module.head.dimension()
        if not 0 <= size <= full_size:
            raise ValueError(f"{key} is {size}; it must be 1 to {full_size}, the size of a vector, or 0 for all of it")
        if size not in (0, full_size) and (problem := self.cut_problem()):
            raise ValueError(f"{key} is {size}, but {problem}: remove {key}")
        return replace(self, cut=0 if size == full_size else size)

    @property
    def vectors_per_passage(self) -> int | None:
        """Return V, the number of vectors of an encoded passage; None: a vector for each token."""
        return self.module.pooling.inference_vectors() if self.module.pooled else self.module.head.vectors_per_passage()

    @property
    def late_interaction(self) -> bool:
        """Return whether a query has a vector for each token, and scores are sums over these vectors."""
        return self.module.head.late_interaction()

    @property
    def sparse(self) -> bool:
        """Return whether vectors are weights of words, nearly all of them 0."""
        return self.module.head.sparse()

    def unpooled(self) -> RetrieverModel:
        """Return this model without pooling, to inspect which vector of a passage has the highest score."""
        return replace(self, module=self.module.clone(pooled=False))

    def vector_counts(self, texts: Ragged, side: Side) -> np.ndarray:
        """Return the number of vectors of each text (token ids) at inference."""
        if (side == "query" and self.late_interaction) or (side == "passage" and self.vectors_per_passage is None):
            head = self.module.head
            preceding_vectors = np.concatenate([[0], np.cumsum(head.vector_mask(texts, side))])
            return np.diff(preceding_vectors[texts.offsets]) + head.selection(side).mean
        return np.full(len(texts), 1 if side == "query" else self.vectors_per_passage)

    def most_vectors(self, length: int) -> int:
        """Return the largest number of vectors of a passage of `length` tokens."""
        return int(self.vector_counts(Ragged(np.full(length, -1), np.array([0, length])), "passage")[0])

    def contract(self) -> dict[str, Any]:
        """Return all settings that vectors depend on, besides the parameters."""
        module = self.module
        shapes = asdict(module.config)
        shapes.pop("classifier_pooling", None)  # a field for cross-encoders
        if module.head.selection("passage").layers == "last":
            shapes.pop("normalize_intermediate", None)  # changes only layers that are not used here
        names = {table[name]: name for table in (HEADS, POOLINGS) for name in table}
        return {
            "encoder": {**shapes, "tied": module.tied, "dtype": jnp.dtype(module.compute.dtype).name},
            "head": {"name": names[type(module.head)], **module.head.contract()},
            "pooling": names[type(module.pooling)],
            "normalize": module.normalize,
            **({"dimension": self.cut} if self.cut else {}),
        }

    def tokenizer_options(self) -> dict[str, Any]:
        return self.module.head.tokenizer_options()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer that does not fit the head."""
        self.module.head.check_tokenizer(tokenizer)

    def stored_head(self, root: Path) -> Params:
        return self.module.head.stored_parameters(root)

    def initial_head(self, weights: Params) -> Params:
        """Return the parameters of the head whose initial values are from the pre-trained encoder; {}: none."""
        return self.module.head.initial_parameters(make_encoder(self.module.config), weights)

    def reference_options(self) -> tuple[str, ...]:
        return self.module.head.reference_options()

    def differences(self) -> tuple[str, ...]:
        """Return the computations that differ from the reference by default."""
        every_layer = self.module.head.selection("passage").layers == "all"
        if every_layer and getattr(self.module.config, "normalize_intermediate", False):
            return ("layers below the last get the final norm (encoder.normalize_intermediate)",)
        return ()

    def encode(
        self,
        params: Params,
        tokens: Tokens,
        side: Side,
        train: bool = False,
        dropout_key: jax.Array | None = None,
        labels: jax.Array | None = None,
    ) -> Embeddings:
        """Return the Embeddings of texts, [B,V,D] float32. V = 1 for queries, except under late interaction.

        Args:
            tokens: token ids [B,T] of the texts.
            side: whether the texts are queries or passages.
            train: whether to use dropout, and to keep the vectors of passages that only the loss reads.
            dropout_key: random key, required if `train`.
            labels: token ids of pseudo-queries [B,U], for heads that learn from them.
        """
        rngs = {"dropout": dropout_key} if train else None
        with jax.named_scope("queries" if side == "query" else "passages"):  # names for profiles and `jaxret plan`
            return self.module.apply({"params": params}, tokens, side, train, labels, rngs=rngs)

    def hidden_states(self, params: Params, tokens: Tokens, side: Side) -> HiddenStates:
        """Return all hidden states of one side's encoder [L+1,B,T,H], to inspect a model."""
        return self.plain.module.apply({"params": params}, tokens, side, method=RetrieverModule.hidden_states)

    def word_values(self, params: Params, tokens: Tokens, side: Side) -> jax.Array:
        """Return the values that the head has for every word of the vocabulary [B,U,vocabulary], to inspect a model.
        `VectorHead.word_values` describes them and the U positions."""
        _, sown = self.plain.module.apply({"params": params}, tokens, side, False, mutable=["intermediates"])
        (values,) = jax.tree.leaves(sown["intermediates"])
        return values

    def init(self, key: jax.Array) -> Params:
        """Return random parameters."""
        tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        keys = {"params": key, "dropout": key}
        return self.plain.module.init(keys, tokens, tokens, method=RetrieverModule.encode_both_sides)["params"]


def encoder_config(config: ConfigDict, directory: Path) -> EncoderConfig:
    """Return the config of the encoder in a Hugging Face directory with the changes of a run's config. The MLM head is
    included if the retrieval head needs it. Raises ValueError for options that the encoder lacks."""
    shapes = read_config(directory)
    if config.encoder.layers:
        if not 0 < config.encoder.layers <= shapes.num_layers:
            raise ValueError(
                f"encoder.layers is {config.encoder.layers}; the encoder in {directory} has {shapes.num_layers}"
            )
        shapes = replace(shapes, num_layers=config.encoder.layers)
    options: dict[str, Any] = {
        "mlm_head": config.task == "retrieval" and "mlm_head" in make_head(config, shapes).needs(),
        "normalize_intermediate": config.encoder.normalize_intermediate,
    }
    names = {field.name for field in fields(shapes)}
    if (rate := config.encoder.attention_dropout) >= 0:
        if "attention_dropout" not in names:
            raise ValueError(
                f"encoder.attention_dropout is {rate}; {directory} has no separate rate for attention: use -1"
            )
        options["attention_dropout"] = rate
    if direction := config.encoder.direction:
        options["causal"] = choose_option(DIRECTIONS, "encoder.direction", direction)
        if "causal" not in names:
            raise ValueError(f"encoder.direction is {direction!r}; {directory} is always bidirectional: use ''")
    return replace(shapes, **{name: value for name, value in options.items() if name in names})


def choose_option(table: dict[str, Any], key: str, name: str) -> Any:
    """Return an entry of a table. Raises ValueError with the config key for an unknown name."""
    if name not in table:
        raise ValueError(f"{key} is {name!r}; it must be one of {', '.join(table)}")
    return table[name]


def check_compute(config: ConfigDict, shapes: EncoderConfig) -> Compute:
    """Return the options of computing a config's encoder. Raises ValueError for options that the encoder lacks."""
    dtype = choose_option(COMPUTE_DTYPES, "encoder.dtype", config.encoder.dtype)
    choose_option(RECOMPUTE, "encoder.recompute", config.encoder.recompute)
    choose_option(ATTENTION_PLATFORMS, "encoder.attention", config.encoder.attention)
    if config.encoder.attention != "plain" and (reason := shapes.lacks.get("fused_attention")):
        raise ValueError(f"encoder.attention is {config.encoder.attention!r}, but {reason}: use 'plain'")
    if config.encoder.attention == "cudnn" and dtype == jnp.float32:
        raise ValueError("encoder.attention is 'cudnn', which needs bfloat16: set encoder.dtype='bfloat16'")
    if config.encoder.attention == "cudnn" and (shapes.head_size > 128 or shapes.head_size % 8):
        raise ValueError(
            f"encoder.attention is 'cudnn', whose heads have at most 128 dimensions, a multiple of 8; the heads of "
            f"this encoder have {shapes.head_size}: use 'plain'"
        )
    return Compute(dtype, config.encoder.recompute, attention=config.encoder.attention)


def make_retriever_model(config: ConfigDict, shapes: EncoderConfig) -> RetrieverModel:
    """Return the retriever of a config with an encoder. Raises ValueError for unknown heads, tokens, poolings and
    dtypes, and for combinations that are not possible."""
    head = make_head(config, shapes)
    pooling = choose_option(POOLINGS, "pooling", config.pooling)(num_vectors=head.vectors_per_passage())
    problem = "" if config.pooling == "none" else head.pooling_problem(config.pooling)
    if problem:
        raise ValueError(f"pooling is {config.pooling!r}, but head {config.head.name!r} {problem}: use 'none'")
    compute = check_compute(config, shapes)
    if config.encoder.attention != "plain" and head.unattended_tokens():
        raise ValueError(
            f"encoder.attention is {config.encoder.attention!r}, whose kernel computes only tokens that other tokens "
            f"attend to, not {head.unattended_tokens()}: use 'plain'"
        )
    module = RetrieverModule(
        config=shapes,
        compute=compute,
        tied=config.encoder.tied,
        head=head,
        pooling=pooling,
        normalize=config.normalize,
        skip_prompt=skips_prompt(config, head),
    )
    return RetrieverModel(module).with_dimension(config.encode.dimension, "encode.dimension")


def skips_prompt(config: ConfigDict, head: VectorHead) -> bool:
    """Return whether tokens of prompts are left out of means. Raises ValueError if vectors are not means of tokens."""
    if read_prompts(config).in_mean:
        return False
    means = head.layers_of("query") and head.layers_of("passage") and head.vectors_per_passage() is not None
    if not means or config.head.token not in ("mean", "mean_without_first"):
        name = config.tokens.prompts
        key = f"tokens.prompts is {name!r}, which leaves" if name else "tokens.prompt_in_mean is False, which leaves"
        raise ValueError(
            f"{key} prompts out of the mean over tokens, but vectors of head {config.head.name!r} with head.token "
            f"{config.head.token!r} are not means: set head.token='mean'"
        )
    return True


def with_pretrained(params: Params, weights: Params, head: Params | None = None) -> Params:
    """Return `params` (arrays or their shapes) with every encoder replaced by the pre-trained encoder, and with the
    parameters of `head` in every head. Raises ValueError for different shapes."""
    encoders = {name: weights for name in params if name.endswith("encoder")}
    encoders |= {name: {**params[name], **head} for name in params if head and name.endswith("head")}
    arrays, expected = (
        traverse_util.flatten_dict(encoders),
        traverse_util.flatten_dict({name: params[name] for name in encoders}),
    )
    for path, leaf in expected.items():
        if np.shape(arrays.get(path)) != tuple(leaf.shape):
            raise ValueError(f"{'/'.join(path)}: {np.shape(arrays.get(path))} loaded, {tuple(leaf.shape)} needed")
    return {**params, **encoders}
