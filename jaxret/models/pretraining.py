"""Pre-training of encoders for retrieval: an MLM head, and a head that makes [CLS] represent the text.

The result is the encoder with its MLM head. Condenser (Gao & Callan 2021): new layers read the last layer's [CLS] and
an early layer's states of the other tokens, so that [CLS] must hold information about the full text. RetroMAE (Xiao et
al. 2022): one layer recovers the text from [CLS] and a small part of the text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct, traverse_util
from jaxtyping import Bool, Float, Int

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import EncoderConfig, make_encoder
from jaxret.models.encoders.architectures.bert import BertConfig, BertLayer, PostNormLayer
from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import Stack
from jaxret.models.model import LinenModel, parameter_shapes
from jaxret.storage.foreign_files import open_tensors, read_tensors
from jaxret.types import HiddenStates, MaskedTexts, Params, Tokens

PRETRAINING_METHODS = ("mlm", "condenser", "cocondenser", "retromae")
# File in the folder of an encoder: the parameters of the head with which the encoder was pre-trained.
PRETRAINING_HEAD = "pretraining.safetensors"


@dataclass(frozen=True)
class PretrainingMethod:
    """A method of PRETRAINING_METHODS and its settings."""

    name: str = "mlm"
    layers: int = 2  # number of layers of Condenser's head
    skip_from: int = 6  # early layer whose states Condenser's head reads
    late: bool = True  # whether the last layer, too, is trained as a masked language model
    contrast: float = 1.0  # weight of coCondenser's contrastive loss of spans

    @property
    def condenses(self) -> bool:
        """Whether the method has Condenser's head."""
        return self.name in ("condenser", "cocondenser")

    @property
    def head(self) -> str:
        """Return the kind of head; "": none. It is stored with the parameters, because parameters of two kinds may have
        the same names and shapes."""
        return "condenser" if self.condenses else "decoder" if self.decodes else ""

    @property
    def in_pairs(self) -> bool:
        """Whether the method contrasts two spans of a document."""
        return self.name == "cocondenser"

    @property
    def decodes(self) -> bool:
        """Whether the method has RetroMAE's decoder."""
        return self.name == "retromae"

    def problem(self, config: EncoderConfig) -> str:
        """Return the reason why an encoder cannot be pre-trained by this method; "" if it can."""
        if reason := config.lacks.get("mlm_head"):
            return reason
        if self.name != "mlm" and not isinstance(config, BertConfig):
            return f"its head has BERT's layers, which {config.model_type} does not use"
        if self.condenses and not 0 <= self.skip_from < config.num_layers:
            below = f"0 to {config.num_layers - 1}"
            return f"pretraining.skip_from is {self.skip_from}, and the layers below the last layer are {below}"
        return ""


@struct.dataclass
class PretrainingOutput:
    """The (sum, count) of every loss for each text, and the last layer's [CLS] of each text."""

    losses: dict[str, Float[jax.Array, "B 2"]]
    vectors: Float[jax.Array, "B H"]


class DecoderLayer(PostNormLayer):
    """A BERT layer whose queries are not the states that it attends to."""

    @nn.compact
    def __call__(
        self,
        queries: Float[jax.Array, "B T H"],
        layout: TokenLayout,
        memory: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T T"],
    ) -> tuple[Float[jax.Array, "B T H"], None]:
        """Return the layer's output and None, as `Stack` needs it.

        Args:
            queries: input of the layer, to which blocks add.
            layout: layout of the queries, for dropout.
            memory: states to attend to.
            mask: mask of the memory for each query.
        """
        drop = Dropout(self.config.hidden_dropout, layout)
        return self.feed_forward_block(self.attention_block(queries, memory, mask, drop), drop), None


class CondenserHead(nn.Module):
    """Condenser's head: new layers over the last layer's [CLS] and an early layer's states of the other tokens."""

    config: BertConfig
    compute: Compute
    length: int  # number of layers

    @nn.compact
    def __call__(
        self, first: Float[jax.Array, "B 1 H"], early: Float[jax.Array, "B T H"], layout: TokenLayout
    ) -> Float[jax.Array, "B T H"]:
        layer = partial(BertLayer, self.config, self.compute, Selection(layers="last"))
        states = jnp.concatenate([first, early[:, 1:]], axis=1)
        return Stack(layer, self.length, self.compute, name="layers")(states, layout)[0]


class DecodingHead(nn.Module):
    """RetroMAE's enhanced decoding: one layer recovers the text from [CLS] and a part of the text's embeddings."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        first: Float[jax.Array, "B 1 H"],
        positions: Float[jax.Array, "*B T H"],
        embeddings: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T T"],
        layout: TokenLayout,
    ) -> Float[jax.Array, "B T H"]:
        """Return the states from which each token is recovered.

        Args:
            first: state of [CLS] from the encoder, which is added to each query and can be attended to.
            positions: position embeddings of the queries.
            embeddings: input of the encoder's first layer.
            mask: tokens that each query attends to.
            layout: layout of the tokens, for dropout.
        """
        compute = replace(self.compute, attention="plain")  # no kernel supports a mask for each query
        memory = jnp.concatenate([first, embeddings[:, 1:]], axis=1)
        layer = partial(DecoderLayer, self.config, compute)
        return Stack(layer, 1, compute, name="layers")(first + positions, layout, memory, mask)[0]


class PretrainingModule(nn.Module):
    """MaskedTexts -> PretrainingOutput. Parameters: `encoder`, with its MLM head, and `head`."""

    config: Any  # config of the encoder, with mlm_head
    compute: Compute
    method: PretrainingMethod

    def setup(self) -> None:
        self.encoder = make_encoder(self.config, self.compute)
        if self.method.condenses:
            self.head = CondenserHead(self.config, self.compute, self.method.layers)
        elif self.method.decodes:
            self.head = DecodingHead(self.config, self.compute)

    def __call__(self, batch: MaskedTexts, train: bool) -> PretrainingOutput:
        tokens, method, losses = batch.tokens, self.method, {}
        layout = TokenLayout.of(tokens, train)
        # Condenser reads two layers. Returning all layers costs no memory, because the backward pass needs them anyway.
        hidden = self.encoder(tokens, Selection(layers="all" if method.condenses else "last"), train).states
        first = hidden[-1, :, :1]
        if method.late or not method.condenses:
            losses["mlm"] = self.recovery_loss(_states_at(hidden[-1], batch.positions), batch.labels)
        if method.condenses:
            read = self.head(first, hidden[method.skip_from], layout)
            losses["head"] = self.recovery_loss(_states_at(read, batch.positions), batch.labels)
        if method.decodes:
            assert batch.targets is not None
            embeddings = self.encoder.embeddings
            positions = embeddings.position(embeddings.positions(batch.original_ids))
            token_embeddings = self.encoder.embed(Tokens(batch.original_ids, tokens.mask, tokens.rows), train)
            read = self.head(first, positions, token_embeddings, batch.attention_mask & tokens.mask[:, None], layout)
            losses["decoder"] = self.recovery_loss(read, batch.targets)
        return PretrainingOutput(losses, first[:, 0].astype(jnp.float32))

    def recovery_loss(
        self, states: Float[jax.Array, "B M H"], labels: Int[jax.Array, "B M"]
    ) -> Float[jax.Array, "B 2"]:
        """Return (sum of -log p(label), number of labels) for each text. The label -1 means no label."""
        logits = self.encoder.mlm_head(states, self.encoder.word_table).astype(jnp.float32)
        real = labels >= 0
        label_logits = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        losses = jnp.where(real, jax.nn.logsumexp(logits, axis=-1) - label_logits, 0.0)
        return jnp.stack([jnp.sum(losses, axis=1), jnp.sum(real, axis=1).astype(jnp.float32)], axis=1)

    def hidden_states(self, tokens: Tokens) -> HiddenStates:
        """Return the encoder's states at all layers and positions [L+1,B,T,H], without dropout."""
        return self.encoder(tokens, Selection())


def _states_at(states: Float[jax.Array, "B T H"], positions: Int[jax.Array, "B M"]) -> Float[jax.Array, "B M H"]:
    return jnp.take_along_axis(states, positions[..., None], axis=1)


@dataclass(frozen=True)
class PretrainingModel(LinenModel):
    """An encoder with its pre-training head, without parameters: a `models.model.Model`."""

    module: PretrainingModule

    def learn(self, params: Params, batch: MaskedTexts, train: bool, dropout_key: jax.Array) -> PretrainingOutput:
        """Return the losses of a batch.

        Args:
            batch: texts with masked tokens.
            train: whether to use dropout.
            dropout_key: random key, used if `train`.
        """
        with jax.named_scope("pretraining"):
            return self.module.apply({"params": params}, batch, train, rngs={"dropout": dropout_key} if train else None)

    def hidden_states(self, params: Params, tokens: Tokens) -> HiddenStates:
        """Return all hidden states of the encoder [L+1,B,T,H], to inspect a model."""
        return self.plain.module.apply({"params": params}, tokens, method=PretrainingModule.hidden_states)

    def init(self, key: jax.Array) -> Params:
        """Return random parameters."""
        tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        none = jnp.zeros((1, 1), jnp.int32)
        batch = MaskedTexts(tokens, none, none)
        if self.module.method.decodes:
            batch = replace(
                batch, original_ids=tokens.ids, attention_mask=jnp.ones((1, 2, 2), bool), targets=tokens.ids
            )
        return self.plain.module.init({"params": key, "dropout": key}, batch, True)["params"]

    def contract(self) -> dict[str, Any]:
        """Return all settings that results depend on, besides the parameters."""
        encoder = {**asdict(self.module.config), "dtype": jnp.dtype(self.compute.dtype).name}
        return {
            "encoder": encoder,
            "head": asdict(self.module.method) | {"name": f"pretraining.{self.module.method.name}"},
        }

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer without [CLS] or [MASK]."""
        for name in ("cls", "mask"):
            if tokenizer.special_ids[name] is None:
                raise ValueError(f"pre-training needs a [{name.upper()}], which the tokenizer does not have")

    def stored_head(self, root: Path) -> Params:
        """Return the head that is stored in the folder of an encoder if it has this kind and these shapes, else {}."""
        path = root / PRETRAINING_HEAD
        if not path.is_file():
            return {}
        with open_tensors(path) as file:
            kind = (file.metadata() or {}).get("head")
        head = traverse_util.unflatten_dict(read_tensors(path), sep="/")
        shapes = parameter_shapes(self).get("head", {})
        fits = kind == self.module.method.head and jax.tree.map(jnp.shape, head) == jax.tree.map(jnp.shape, shapes)
        return head if fits else {}
