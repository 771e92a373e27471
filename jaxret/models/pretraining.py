"""What encoders are pre-trained with for retrieval: an MLM head, and a head that makes [CLS] hold the text. Only the
encoder and its MLM head are the result.

Condenser (Gao & Callan 2021): fresh layers read the last [CLS] beside the tokens' states of an early layer, so that
what they need of the whole text must be in [CLS]. RetroMAE (Xiao et al. 2022): one layer recovers the text from [CLS]
and a little of the text.
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
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import EncoderConfig, make_encoder
from jaxret.models.encoders.bert import ACTIVATIONS, Attention, BertConfig, BertLayer, dense, layer_norm
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import Compute, dropout, dropout_rows
from jaxret.models.encoders.layout import Layout, Rows
from jaxret.models.encoders.stack import Stack
from jaxret.models.model import LinenModel, Params
from jaxret.types import HiddenStates, Masked, Tokens

METHODS = ("mlm", "condenser", "cocondenser", "retromae")
HEAD = "pretraining.safetensors"  # beside an encoder: the parameters of the head that it was pre-trained with


@dataclass(frozen=True)
class Method:
    """What is learned. layers: of Condenser's head; it reads layer `skip_from`. late: whether the last layer is a
    masked language model too, beside the head. contrast: the weight of coCondenser's contrast of spans."""

    name: str = "mlm"
    layers: int = 2
    skip_from: int = 6
    late: bool = True
    contrast: float = 1.0

    @property
    def condenses(self) -> bool:
        return self.name in ("condenser", "cocondenser")

    @property
    def head(self) -> str:
        """What its head is called beside an encoder: parameters of two kinds may have the same names and shapes."""
        return "condenser" if self.condenses else "decoder" if self.decodes else ""

    @property
    def pairs(self) -> bool:
        """Whether it compares two spans of a document."""
        return self.name == "cocondenser"

    @property
    def decodes(self) -> bool:
        return self.name == "retromae"

    def problem(self, config: EncoderConfig) -> str:
        """Why an encoder cannot be pre-trained so; "" if it can."""
        if reason := config.lacks.get("mlm_head"):
            return reason
        if self.name != "mlm" and not isinstance(config, BertConfig):
            return f"its head is of BERT's layers, and {config.model_type} has others"
        if self.condenses and not 0 <= self.skip_from < config.num_layers:
            below = f"0 to {config.num_layers - 1}"
            return f"pretraining.skip_from is {self.skip_from}, and the layers below the encoder's last are {below}"
        return ""


@struct.dataclass
class Learned:
    """Of each text: (sum, count) of every loss, by name, and the last layer's [CLS]."""

    losses: dict[str, Float[jax.Array, "B 2"]]
    vectors: Float[jax.Array, "B H"]


class DecoderLayer(nn.Module):
    """A BERT layer whose queries, to which its output is added, are not what it attends to."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        asked: Float[jax.Array, "B T H"],
        memory: Float[jax.Array, "B T H"],
        seen: Bool[jax.Array, "B T T"],
        rows: Rows,
    ) -> tuple[Float[jax.Array, "B T H"], None]:
        c = self.config
        drop = dropout(c.hidden_dropout, rows)
        attended = Attention(c, self.compute, name="attention")(asked, memory, seen, rows)
        hidden = layer_norm(c, "attention_norm")(asked + drop(attended))
        wide = ACTIVATIONS[c.hidden_act](dense(c.intermediate_size, c, self.compute, "intermediate")(hidden))
        narrow = dense(c.hidden_size, c, self.compute, "output")(wide)
        return layer_norm(c, "output_norm")(hidden + drop(narrow)), None


class CondenserHead(nn.Module):
    """[last [CLS] ; tokens' states of an early layer] -> states to recover hidden tokens from."""

    config: BertConfig
    compute: Compute
    length: int

    @nn.compact
    def __call__(
        self,
        first: Float[jax.Array, "B 1 H"],
        early: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"],
        rows: Rows,
    ) -> Float[jax.Array, "B T H"]:
        layer = partial(BertLayer, self.config, self.compute, Keep(layers="last"))
        mixed = jnp.concatenate([first, early[:, 1:]], axis=1)
        return Stack(layer, self.length, self.compute, name="layers")(mixed, Layout(mask), rows)[0]


class DecodingHead(nn.Module):
    """RetroMAE's enhanced decoding: each position asks with [CLS] and where it is, [CLS] and those embeddings of the
    text that its row of `seen` has."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        first: Float[jax.Array, "B 1 H"],
        positions: Float[jax.Array, "*B T H"],
        embedded: Float[jax.Array, "B T H"],
        seen: Bool[jax.Array, "B T T"],
        rows: Rows,
    ) -> Float[jax.Array, "B T H"]:
        compute = replace(self.compute, attention="plain")  # no kernel has a mask for each row
        memory = jnp.concatenate([first, embedded[:, 1:]], axis=1)
        layer = partial(DecoderLayer, self.config, compute)
        return Stack(layer, 1, compute, name="layers")(first + positions, memory, seen, rows)[0]


class PretrainingModule(nn.Module):
    """Masked -> Learned. Parameters: `encoder`, with its MLM head, and `head`."""

    config: Any  # of the encoder, with mlm_head
    compute: Compute
    method: Method

    def setup(self) -> None:
        self.encoder = make_encoder(self.config, self.compute)
        if self.method.condenses:
            self.head = CondenserHead(self.config, self.compute, self.method.layers)
        elif self.method.decodes:
            self.head = DecodingHead(self.config, self.compute)

    def __call__(self, batch: Masked, train: bool) -> Learned:
        tokens, method, losses = batch.tokens, self.method, {}
        rows = dropout_rows(tokens, train)
        # Of Condenser two layers are read; all leave the encoder, which the backward pass needs them of anyway.
        hidden = self.encoder(tokens, Keep(layers="all" if method.condenses else "last"), train).states
        first = hidden[-1, :, :1]
        if method.late or not method.condenses:
            losses["mlm"] = self.recovered(_at(hidden[-1], batch.places), batch.labels)
        if method.condenses:
            read = self.head(first, hidden[method.skip_from], tokens.mask, rows)
            losses["head"] = self.recovered(_at(read, batch.places), batch.labels)
        if method.decodes:
            assert batch.targets is not None
            embeddings = self.encoder.embeddings
            positions = embeddings.position(embeddings.positions(batch.whole))
            embedded = self.encoder.embed(Tokens(batch.whole, tokens.mask, tokens.rows), train)
            read = self.head(first, positions, embedded, batch.seen & tokens.mask[:, None], rows)
            losses["decoder"] = self.recovered(read, batch.targets)
        return Learned(losses, first[:, 0].astype(jnp.float32))

    def recovered(self, states: Float[jax.Array, "B M H"], labels: Int[jax.Array, "B M"]) -> Float[jax.Array, "B 2"]:
        """(sum of -log p(label), number of labels) of each text; label -1 is none."""
        logits = self.encoder.mlm_head(states, self.encoder.word_table).astype(jnp.float32)
        there = labels >= 0
        own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        lost = jnp.where(there, jax.nn.logsumexp(logits, axis=-1) - own, 0.0)
        return jnp.stack([jnp.sum(lost, axis=1), jnp.sum(there, axis=1).astype(jnp.float32)], axis=1)

    def hidden_states(self, tokens: Tokens) -> HiddenStates:
        return self.encoder(tokens, Keep())


def _at(states: Float[jax.Array, "B T H"], places: Int[jax.Array, "B M"]) -> Float[jax.Array, "B M H"]:
    return jnp.take_along_axis(states, places[..., None], axis=1)


@dataclass(frozen=True)
class Pretrainer(LinenModel):
    """An encoder with what it is pre-trained with. Holds no parameters. A `models.model.Model`."""

    module: PretrainingModule

    def learn(self, params: Params, batch: Masked, train: bool, dropout_key: jax.Array) -> Learned:
        """What the texts of a batch say of the parameters."""
        with jax.named_scope("pretraining"):
            return self.module.apply({"params": params}, batch, train, rngs={"dropout": dropout_key} if train else None)

    def hidden_states(self, params: Params, tokens: Tokens) -> HiddenStates:
        """Every hidden state of the encoder [L+1,B,T,H]; for looking into a model."""
        return self.plain.module.apply({"params": params}, tokens, method=PretrainingModule.hidden_states)

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        none = jnp.zeros((1, 1), jnp.int32)
        batch = Masked(tokens, none, none)
        if self.module.method.decodes:
            batch = replace(batch, whole=tokens.ids, seen=jnp.ones((1, 2, 2), bool), targets=tokens.ids)
        return self.plain.module.init({"params": key, "dropout": key}, batch, True)["params"]

    def contract(self) -> dict[str, Any]:
        """Everything but the parameters that its results depend on."""
        encoder = {**asdict(self.module.config), "dtype": jnp.dtype(self.compute.dtype).name}
        return {
            "encoder": encoder,
            "head": asdict(self.module.method) | {"name": f"pretraining.{self.module.method.name}"},
        }

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raises ValueError for a tokenizer without [CLS] or [MASK]."""
        for name in ("cls", "mask"):
            if tokenizer.special_ids[name] is None:
                raise ValueError(f"pre-training needs a [{name.upper()}], which the tokenizer does not have")

    def stored_head(self, root: Path) -> Params:
        """The head that an encoder was pre-trained with before, where it lies beside it and is of the same kind and
        shapes; else {}."""
        path = root / HEAD
        if not path.is_file():
            return {}
        with safe_open(path, framework="numpy") as file:
            kind = (file.metadata() or {}).get("head")
        found = traverse_util.unflatten_dict(load_file(path), sep="/")
        shapes = jax.eval_shape(self.init, jax.random.key(0)).get("head", {})
        same = kind == self.module.method.head and jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes)
        return found if same else {}
