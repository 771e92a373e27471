"""I3 (Dong et al. 2023): a passage reads queries it imagines, before any query is there."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.bert import ACTIVATIONS, Attention, BertConfig, BertLayer, dense, layer_norm
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import Compute, dropout, dropout_rows
from jaxret.models.encoders.layout import Layout, Rows
from jaxret.models.encoders.stack import Stack
from jaxret.models.heads.head import Head, Side, Text
from jaxret.types import Embeddings, HiddenStates, Tokens

VARIANTS = ("paper", "released")


class ReconstructorLayer(nn.Module):
    """Self-attention over the pseudo-query (both ways), cross-attention to the passage, feed-forward: the layer of
    transformers' BERT decoder without its causal mask."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B U H"],
        states: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"],
        rows: Rows,
    ) -> tuple[Float[jax.Array, "B U H"], None]:
        c = self.config
        drop = dropout(c.hidden_dropout, rows)
        everything = jnp.ones(hidden.shape[:2], bool)
        attended = Attention(c, self.compute, name="attention")(hidden, hidden, everything, rows)
        hidden = layer_norm(c, "attention_norm")(hidden + drop(attended))
        crossed = Attention(c, self.compute, name="cross_attention")(hidden, states, mask, rows)
        hidden = layer_norm(c, "cross_attention_norm")(hidden + drop(crossed))
        wide = ACTIVATIONS[c.hidden_act](dense(c.intermediate_size, c, self.compute, "intermediate")(hidden))
        narrow = dense(c.hidden_size, c, self.compute, "output")(wide)
        return layer_norm(c, "output_norm")(hidden + drop(narrow)), None


class ImplicitInteraction(Head):
    """V = 1. The query is h[L][0]; a passage's vector is the interactor's output at [CLS].

    variant "paper": U is K = `pseudo_length` [MASK] embeddings; the reconstructor's layers read all passage tokens P
    and give Z; the interactor's layers read [P ; Z]. variant "released" (the published code): U is [CLS], K - 2 times
    [MASK], [SEP]; the reconstructor reads [CLS]'s vector c alone; the interactor reads [c ; mean(Z)].

    In training, where a text has a pseudo-query, `own_loss` is the cross-entropy of a vocabulary projection of Z_j
    against its j-th token, summed, and the number of tokens (I3 eq. 10). The loss adds their mean, multiplied by
    `reconstruction_weight` * `reconstruction_decay`^epoch, epochs counted from 0 (eq. 11).
    """

    mask_id: int = 103
    variant: str = "paper"
    reconstructor_layers: int = 1
    interactor_layers: int = 1
    pseudo_length: int = 32
    reconstruction_weight: float = 1.0
    reconstruction_decay: float = 0.1

    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ("reconstruction_weight", "reconstruction_decay")
    RENAMED: ClassVar[dict[str, str]] = {
        **{f"{part}_layers": f"head.{part}_layers" for part in ("reconstructor", "interactor")},
        **{key: f"head.{key}" for key in ("mask_id", "variant", "pseudo_length")},
        **{f"reconstruction_{key}": f"loss.reconstruction_{key}" for key in ("weight", "decay")},
    }

    def check(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"head.implicit.variant is {self.variant!r}; it must be one of {', '.join(VARIANTS)}")
        if self.token != "cls":
            raise ValueError("head.token is 'mean'; the interactor's output is read at [CLS]: use 'cls'")
        if min(self.reconstructor_layers, self.interactor_layers) < 1 or self.pseudo_length < 3:
            raise ValueError(
                "head.implicit.reconstructor_layers and head.implicit.interactor_layers are at least 1, "
                "head.implicit.pseudo_length 3"
            )

    def needs(self) -> tuple[str, ...]:
        return "cls", "positioned_masks"

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        super().check_tokenizer(tokenizer)
        if tokenizer.mask_id != self.mask_id:
            raise ValueError(
                f"head.implicit.mask_id is {self.mask_id}, but the tokenizer's [MASK] is {tokenizer.mask_id}"
            )

    def keep(self, side: Side) -> Keep:
        return Keep(1 if side == "query" or self.variant == "released" else None, layers="last")

    def loss(self) -> dict[str, Any]:
        return {"own_weight": self.reconstruction_weight, "own_decay": self.reconstruction_decay}

    def pseudo_query_length(self) -> int:
        return self.pseudo_length

    def words(self, side: Side) -> str:
        return "" if side == "query" else "probability of each word at the tokens of the query that it imagines"

    def reference_options(self) -> tuple[str, ...]:
        released = self.variant == "released"
        return ("head.implicit.variant=released (the reconstructor sees [CLS] alone)",) if released else ()

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        states, mask = hidden.states[-1], hidden.mask
        if text.side == "query":
            return Embeddings(states, mask)
        c, compute = text.encoder.config, text.encoder.compute
        ids, rows = self.pseudo_ids(text), dropout_rows(text.tokens, text.train)
        pseudo = text.encoder.embed(Tokens(ids, jnp.ones(ids.shape, bool), text.tokens.rows), text.train)  # [B,U,H]

        reader = partial(ReconstructorLayer, c, compute)
        read = Stack(reader, self.reconstructor_layers, compute, name="reconstructor_layers")
        imagined, _ = read(pseudo, states, mask, rows)  # Z [B,U,H]
        summary = jnp.mean(imagined, axis=1, keepdims=True) if self.variant == "released" else imagined
        together = jnp.concatenate([states, summary], axis=1)
        there = jnp.concatenate([mask, jnp.ones(summary.shape[:2], bool)], axis=1)
        layer = partial(BertLayer, c, compute, Keep(1, layers="last"))
        interact = Stack(layer, self.interactor_layers, compute, name="interactor_layers")
        vectors, _ = interact(together, Layout(there), rows, first=1)
        if self.is_mutable_collection("intermediates"):  # somebody reads what is imagined
            self.sow("intermediates", "words", jax.nn.softmax(self.vocabulary(imagined, c, compute)))
        own_loss = None
        if text.labels is not None or self.is_initializing():
            labels = text.labels if text.labels is not None else jnp.zeros(imagined.shape[:2], jnp.int32)
            own_loss = self.reconstruction(imagined, labels, c, compute)
        return Embeddings(vectors[:, :1], mask[:, :1], own_loss if text.labels is not None else None)

    def pseudo_ids(self, text: Text) -> Int[jax.Array, "B U"]:
        """U of the variant; [CLS] and [SEP] are those of the text itself."""
        ids = jnp.full((len(text.tokens.ids), self.pseudo_length), self.mask_id, jnp.int32)
        if self.variant == "released":
            last = jnp.sum(text.tokens.mask, axis=1, keepdims=True) - 1
            end = jnp.take_along_axis(text.tokens.ids, jnp.maximum(last, 0), axis=1)
            ids = ids.at[:, 0].set(text.tokens.ids[:, 0]).at[:, -1].set(end[:, 0])
        return ids

    @nn.nowrap
    def reconstruction(
        self, imagined: Float[jax.Array, "B U H"], labels: Int[jax.Array, "B U"], c: BertConfig, compute: Compute
    ) -> Float[jax.Array, "B 2"]:
        """(sum of cross-entropies, number of tokens) of each text; label -1 has no token."""
        logits = self.vocabulary(imagined, c, compute)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        real = labels >= 0
        return jnp.stack([-jnp.sum(jnp.where(real, chosen, 0.0), axis=1), jnp.sum(real, axis=1)], axis=1)

    @nn.nowrap
    def vocabulary(
        self, imagined: Float[jax.Array, "B U H"], c: BertConfig, compute: Compute
    ) -> Float[jax.Array, "B U vocabulary"]:
        """Logits of Z: a new MLM head whose output matrix is its own, not the word table."""
        transformed = ACTIVATIONS[c.hidden_act](dense(c.hidden_size, c, compute, "vocabulary_dense")(imagined))
        transformed = layer_norm(c, "vocabulary_norm")(transformed)
        return dense(c.vocab_size, c, compute, "vocabulary")(transformed).astype(jnp.float32)
