"""BiEncoder = encoder(s) + head + pooling. `BiEncoder.encode` is the only way from tokens to vectors, in training,
validation, corpus encoding and search alike."""

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

from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import EncoderConfig, make_encoder, read_config
from jaxret.models.encoders.fused import PLATFORMS
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import RECOMPUTE, Compute
from jaxret.models.encoders.pretrained import Params
from jaxret.models.heads import HEADS, make_head, stored_parameters
from jaxret.models.heads.head import Head, Side, Text
from jaxret.models.model import LinenModel
from jaxret.models.pooling import POOLINGS
from jaxret.types import Embeddings, HiddenStates, Ragged, Tokens

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class RetrieverModule(nn.Module):
    """The parameters' tree: `encoder` (tied) or `query_encoder` and `passage_encoder`, then `head` and `pooling`."""

    config: EncoderConfig
    compute: Compute
    tied: bool
    head: Head
    pooling: nn.Module
    normalize: bool
    pooled: bool = True

    def setup(self) -> None:
        if self.tied:
            self.encoder = make_encoder(self.config, self.compute)
        else:
            self.query_encoder = make_encoder(self.config, self.compute)
            self.passage_encoder = make_encoder(self.config, self.compute)
            self.query_head, self.passage_head = self.head.clone(), self.head.clone()

    def __call__(self, tokens: Tokens, side: Side, train: bool, labels: jax.Array | None = None) -> Embeddings:
        encoder = self._encoder(side)
        head = self.head if self.tied else getattr(self, f"{side}_head")
        hidden = encoder(head.seen(tokens, side), head.keep(side), train, head.leading(side))
        embeddings = head(hidden, Text(side, replace(tokens, packing=None), encoder, train, labels))
        # Everything after the encoder is float32: scores of bf16 vectors would have ties where there are none.
        embeddings = replace(embeddings, vectors=embeddings.vectors.astype(jnp.float32))
        if side == "passage" and self.pooled:
            embeddings = self.pooling(embeddings, train)
        if self.normalize:
            squares = jnp.sum(embeddings.vectors**2, axis=-1, keepdims=True)
            embeddings = replace(embeddings, vectors=embeddings.vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24)))
        return embeddings

    def _encoder(self, side: Side) -> Any:
        return self.encoder if self.tied else getattr(self, f"{side}_encoder")

    def hidden_states(self, tokens: Tokens, side: Side) -> HiddenStates:
        return self._encoder(side)(replace(tokens, packing=None), Keep())

    def both(self, queries: Tokens, passages: Tokens) -> tuple[Embeddings, Embeddings]:
        """Touches every parameter once; used to initialise."""
        return self(queries, "query", True), self(passages, "passage", True)


@dataclass(frozen=True)
class BiEncoder(LinenModel):
    """A retrieval family: how text becomes vectors. Holds no parameters."""

    module: RetrieverModule

    @property
    def dimension(self) -> int:
        """D, the size of one vector."""
        return self.module.head.dimension()

    @property
    def vectors_per_passage(self) -> int | None:
        """V of an encoded passage at inference; None: one for each of its tokens."""
        return self.module.pooling.inference_vectors() if self.module.pooled else self.module.head.vectors_per_passage()

    @property
    def late_interaction(self) -> bool:
        """Whether a query has a vector for each of its tokens, and its score is a sum over them."""
        return self.module.head.late_interaction()

    def unpooled(self) -> BiEncoder:
        """The same retriever with a passage's vectors as the head gives them; for looking at which one wins."""
        return BiEncoder(self.module.clone(pooled=False))

    def vector_counts(self, texts: Ragged, side: Side) -> np.ndarray:
        """How many vectors texts (token ids) have at inference."""
        if (side == "query" and self.late_interaction) or (side == "passage" and self.vectors_per_passage is None):
            head = self.module.head
            before = np.concatenate([[0], np.cumsum(head.kept(texts, side))])
            return np.diff(before[texts.offsets]) + head.keep(side).mean
        return np.full(len(texts), 1 if side == "query" else self.vectors_per_passage)

    def most_vectors(self, length: int) -> int:
        """How many vectors a passage of `length` tokens may have."""
        return int(self.vector_counts(Ragged(np.full(length, -1), np.array([0, length])), "passage")[0])

    def contract(self) -> dict[str, Any]:
        """Everything of the model, but its parameters, that vectors depend on."""
        module = self.module
        shapes = asdict(module.config)
        shapes.pop("classifier_pooling", None)  # of cross-encoders
        if module.head.keep("passage").layers == "last":
            shapes.pop("normalize_intermediate", None)  # of layers that nobody reads
        names = {table[name]: name for table in (HEADS, POOLINGS) for name in table}
        return {
            "encoder": {**shapes, "tied": module.tied, "dtype": jnp.dtype(module.compute.dtype).name},
            "head": {"name": names[type(module.head)], **module.head.contract()},
            "pooling": names[type(module.pooling)],
            "normalize": module.normalize,
        }

    def text_options(self) -> dict[str, Any]:
        """What else than in every family a tokenizer does: fields of TextTokenizer."""
        return self.module.head.text_options()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raises ValueError for a tokenizer whose words do not fit the head."""
        self.module.head.check_tokenizer(tokenizer)

    def stored_head(self, root: Path) -> Params:
        """What a model's directory has for the parameters of the head; {} if nothing."""
        return stored_parameters(root, self.module.head)

    def reference_options(self) -> tuple[str, ...]:
        """What is set as a published implementation has it, where that is not as in the paper."""
        return self.module.head.reference_options()

    def differences(self) -> tuple[str, ...]:
        """What is computed otherwise than the reference does, by default."""
        every_layer = self.module.head.keep("passage").layers == "all"
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
        """Tokens [B,T] -> Embeddings [B,V,D] float32; V = 1 for queries, except under late interaction. `dropout_key`
        is needed if `train`; `labels` are pseudo-queries [B,U], for heads that learn from them."""
        rngs = {"dropout": dropout_key} if train else None
        with jax.named_scope("queries" if side == "query" else "passages"):  # for profiles, and `jaxret plan`
            return self.module.apply({"params": params}, tokens, side, train, labels, rngs=rngs)

    def hidden_states(self, params: Params, tokens: Tokens, side: Side) -> HiddenStates:
        """Every hidden state of the side's encoder [L+1,B,T,H]; for looking into a model, not for retrieval."""
        return self.plain.module.apply({"params": params}, tokens, side, method=RetrieverModule.hidden_states)

    def words(self, params: Params, tokens: Tokens, side: Side) -> jax.Array:
        """What the head says of every word at U places of each text [B,U,vocabulary] (`Head.words`); for looking into
        a model, too."""
        _, sown = self.plain.module.apply({"params": params}, tokens, side, False, mutable=["intermediates"])
        (found,) = jax.tree.leaves(sown["intermediates"])
        return found

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        keys = {"params": key, "dropout": key}
        return self.plain.module.init(keys, tokens, tokens, method=RetrieverModule.both)["params"]


def encoder_config(config: ConfigDict, directory: Path) -> EncoderConfig:
    """The encoder that `config` takes from a Hugging Face directory: all of it, or its first layers, perhaps with the
    MLM head. Raises ValueError for what this encoder cannot do."""
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
    there = {field.name for field in fields(shapes)}
    if (rate := config.encoder.attention_dropout) >= 0:
        if "attention_dropout" not in there:
            raise ValueError(f"encoder.attention_dropout is {rate}; {directory} has one dropout for everything: use -1")
        options["attention_dropout"] = rate
    return replace(shapes, **{name: value for name, value in options.items() if name in there})


def choose(table: dict[str, Any], key: str, name: str) -> Any:
    """What a table has under a name. Raises ValueError, with the key of the config, if it has nothing."""
    if name not in table:
        raise ValueError(f"{key} is {name!r}; it must be one of {', '.join(table)}")
    return table[name]


def check_compute(config: ConfigDict, shapes: EncoderConfig) -> Compute:
    """How a config wants its encoder computed. Raises ValueError for what the encoder cannot have."""
    dtype = choose(DTYPES, "encoder.dtype", config.encoder.dtype)
    choose(RECOMPUTE, "encoder.recompute", config.encoder.recompute)
    choose(PLATFORMS, "encoder.attention", config.encoder.attention)
    if config.encoder.attention != "plain" and (reason := shapes.lacks.get("fused_attention")):
        raise ValueError(f"encoder.attention is {config.encoder.attention!r}, but {reason}: use 'plain'")
    if config.encoder.attention == "cudnn" and dtype == jnp.float32:
        raise ValueError("encoder.attention is 'cudnn', which multiplies bfloat16: set encoder.dtype to it")
    return Compute(dtype, config.encoder.recompute, attention=config.encoder.attention)


def build_retriever(config: ConfigDict, shapes: EncoderConfig) -> BiEncoder:
    """Config -> BiEncoder. Raises ValueError for unknown heads, tokens, poolings and dtypes, and for combinations that
    mean nothing."""
    head = make_head(config, shapes)
    pooling = choose(POOLINGS, "pooling", config.pooling)(num_vectors=head.vectors_per_passage())
    problem = "" if config.pooling == "none" else head.pooling_problem(config.pooling)
    if problem:
        raise ValueError(f"pooling is {config.pooling!r}, but head {config.head.name!r} {problem}: use 'none'")
    compute = check_compute(config, shapes)
    if config.encoder.attention != "plain" and head.unseen():
        raise ValueError(
            f"encoder.attention is {config.encoder.attention!r}, whose kernel computes no token that others do not "
            f"see, and here are {head.unseen()}: use 'plain'"
        )
    module = RetrieverModule(
        config=shapes,
        compute=compute,
        tied=config.encoder.tied,
        head=head,
        pooling=pooling,
        normalize=config.normalize,
    )
    return BiEncoder(module)


def with_pretrained(params: Params, weights: Params, head: Params | None = None) -> Params:
    """Replaces every encoder in `params` (concrete or abstract) by the pre-trained one, and in every head
    the parts that are given."""
    encoders = {name: weights for name in params if name.endswith("encoder")}
    encoders |= {name: {**params[name], **head} for name in params if head and name.endswith("head")}
    found, expected = traverse_util.flatten_dict(encoders), traverse_util.flatten_dict({n: params[n] for n in encoders})
    for path, leaf in expected.items():
        if np.shape(found.get(path)) != tuple(leaf.shape):
            raise ValueError(f"{'/'.join(path)}: {np.shape(found.get(path))} loaded, {tuple(leaf.shape)} needed")
    return {**params, **encoders}
