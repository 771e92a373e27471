"""I3 (Dong et al. 2023): implicit interaction of a passage with pseudo-queries that are generated from it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures.bert import (
    ACTIVATIONS,
    BertConfig,
    BertLayer,
    PostNormLayer,
    bert_dense,
    bert_norm,
)
from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import Stack
from jaxret.models.heads.head import HeadInput, Side, VectorHead
from jaxret.types import Embeddings, HiddenStates, Params, Tokens

VARIANTS = ("paper", "released")


class ReconstructorLayer(PostNormLayer):
    """A layer of transformers' BERT decoder without its causal mask: self-attention over the pseudo-query,
    cross-attention to the passage, feed-forward network."""

    @nn.compact
    def __call__(
        self,
        hidden: Float[jax.Array, "B U H"],
        layout: TokenLayout,
        states: Float[jax.Array, "B T H"],
        mask: Bool[jax.Array, "B T"],
    ) -> tuple[Float[jax.Array, "B U H"], None]:
        """Return the layer's output and None, as `Stack` needs it.

        Args:
            hidden: states of the pseudo-query.
            layout: layout of the pseudo-query.
            states: states of the passage.
            mask: real tokens of the passage.
        """
        drop = Dropout(self.config.hidden_dropout, layout)
        context = self.attention_block(hidden, hidden, layout.mask, drop)
        cross_context = self.attention_block(context, states, mask, drop, "cross_attention")
        return self.feed_forward_block(cross_context, drop), None


class I3Head(VectorHead):
    """V = 1. The query is h[L][0]. A passage's vector is the output of the interactor at [CLS].

    The reconstructor computes Z from the passage and a pseudo-query U of K = `pseudo_length` vectors. The interactor
    combines the passage with Z.

    variant "paper": U is a parameter, which starts as the encoder's [MASK] embeddings. The reconstructor reads all
    passage tokens P; the interactor reads [P ; Z].
    variant "released" (the published code): U is the encoder's embeddings of [CLS], K - 2 times [MASK], [SEP]. The
    reconstructor reads only the state c of [CLS]; the interactor reads [c ; mean(Z)].

    In training, `auxiliary_loss` of a text with a pseudo-query is the sum of the cross-entropies of its j-th token
    under a vocabulary projection of Z_j, and the number of tokens (I3 eq. 10). The loss adds their mean, multiplied by
    `reconstruction_weight` * `reconstruction_decay`^epoch, where epochs count from 0 (eq. 11).
    """

    mask_id: int = 103
    variant: str = "paper"  # one of VARIANTS
    reconstructor_layers: int = 1
    interactor_layers: int = 1
    pseudo_length: int = 32  # K, tokens of the pseudo-query
    reconstruction_weight: float = 1.0
    reconstruction_decay: float = 0.1

    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ("reconstruction_weight", "reconstruction_decay")

    def check(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"head.i3.variant is {self.variant!r}; it must be one of {', '.join(VARIANTS)}")
        if self.token != "cls":
            raise ValueError(f"head.token is {self.token!r}; the interactor's output is read at [CLS]: use 'cls'")
        if min(self.reconstructor_layers, self.interactor_layers) < 1 or self.pseudo_length < 3:
            raise ValueError(
                "head.i3.reconstructor_layers and head.i3.interactor_layers must be at least 1, and "
                "head.i3.pseudo_length at least 3"
            )

    def needs(self) -> tuple[str, ...]:
        return "cls", "positioned_masks"

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        super().check_tokenizer(tokenizer)
        if tokenizer.mask_id != self.mask_id:
            raise ValueError(f"head.i3.mask_id is {self.mask_id}, but the tokenizer's [MASK] is {tokenizer.mask_id}")

    def selection(self, side: Side) -> Selection:
        return Selection(1 if side == "query" or self.variant == "released" else None, layers="last")

    def loss_settings(self) -> dict[str, Any]:
        return {"auxiliary_weight": self.reconstruction_weight, "auxiliary_decay": self.reconstruction_decay}

    def pseudo_query_length(self) -> int:
        return self.pseudo_length

    def word_values(self, side: Side) -> str:
        return "" if side == "query" else "probability of each word at the tokens of the reconstructed pseudo-query"

    def reference_options(self) -> tuple[str, ...]:
        released = self.variant == "released"
        return ("head.i3.variant=released (the reconstructor reads only [CLS])",) if released else ()

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        states, mask = hidden.states[-1], hidden.mask
        if text.side == "query":
            return Embeddings(states, mask)
        config, compute = text.encoder.config, replace(text.encoder.compute, adapters=None)
        pseudo_tokens = self.pseudo_tokens(text)
        layout = TokenLayout.of(pseudo_tokens, text.train)
        if self.variant == "released":
            pseudo = text.encoder.embed(pseudo_tokens, text.train)  # [B,U,H]
        else:
            shape = self.pseudo_length, self.hidden_size
            inputs = self.param("pseudo_inputs", nn.initializers.normal(config.initializer_range), shape)
            pseudo_inputs = jnp.broadcast_to(inputs, (len(pseudo_tokens.ids), *shape))
            pseudo = Dropout(config.hidden_dropout, layout)(pseudo_inputs)

        reconstructor_layer = partial(ReconstructorLayer, config, compute)
        reconstructor = Stack(reconstructor_layer, self.reconstructor_layers, compute, name="reconstructor_layers")
        interaction, _ = reconstructor(pseudo, layout, states, mask)  # Z [B,U,H]
        summary = jnp.mean(interaction, axis=1, keepdims=True) if self.variant == "released" else interaction
        joint = jnp.concatenate([states, summary], axis=1)
        joint_mask = jnp.concatenate([mask, jnp.ones(summary.shape[:2], bool)], axis=1)
        layer = partial(BertLayer, config, compute, Selection(1, layers="last"))
        interactor = Stack(layer, self.interactor_layers, compute, name="interactor_layers")
        vectors, _ = interactor(joint, TokenLayout(joint_mask, layout.batch_rows), first=1)
        if self.is_mutable_collection("intermediates"):  # for RetrieverModel.word_values
            self.sow("intermediates", "words", jax.nn.softmax(self.vocabulary(interaction, config, compute)))
        auxiliary_loss = None
        if text.labels is not None or self.is_initializing():
            labels = text.labels if text.labels is not None else jnp.zeros(interaction.shape[:2], jnp.int32)
            auxiliary_loss = self.reconstruction(interaction, labels, config, compute)
        return Embeddings(vectors[:, :1], mask[:, :1], auxiliary_loss if text.labels is not None else None)

    def initial_parameters(self, encoder: Any, weights: Params) -> Params:
        """Return U of variant "paper": the encoder's [MASK] embeddings at positions 0 to K - 1."""
        if self.variant == "released":
            return {}
        ids = jnp.full((1, self.pseudo_length), self.mask_id, jnp.int32)
        masks = encoder.apply({"params": weights}, Tokens(ids, jnp.ones(ids.shape, bool)), False, method="embed")
        return {"pseudo_inputs": jax.device_get(masks[0])}

    def pseudo_tokens(self, text: HeadInput) -> Tokens:
        """Return the tokens of U. In variant "released", the text's first and last token are around the [MASK]s."""
        ids = jnp.full((len(text.tokens.ids), self.pseudo_length), self.mask_id, jnp.int32)
        if self.variant == "released":
            last = jnp.sum(text.tokens.mask, axis=1, keepdims=True) - 1
            end = jnp.take_along_axis(text.tokens.ids, jnp.maximum(last, 0), axis=1)
            ids = ids.at[:, 0].set(text.tokens.ids[:, 0]).at[:, -1].set(end[:, 0])
        return Tokens(ids, jnp.ones(ids.shape, bool), text.tokens.rows)

    @nn.nowrap
    def reconstruction(
        self,
        interaction: Float[jax.Array, "B U H"],
        labels: Int[jax.Array, "B U"],
        config: BertConfig,
        compute: Compute,
    ) -> Float[jax.Array, "B 2"]:
        """Return (sum of cross-entropies, number of tokens) of each text.

        Args:
            interaction: states Z.
            labels: token ids of the pseudo-query; -1: no token.
        """
        logits = self.vocabulary(interaction, config, compute)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        real = labels >= 0
        return jnp.stack([-jnp.sum(jnp.where(real, scores, 0.0), axis=1), jnp.sum(real, axis=1)], axis=1)

    @nn.nowrap
    def vocabulary(
        self, interaction: Float[jax.Array, "B U H"], config: BertConfig, compute: Compute
    ) -> Float[jax.Array, "B U vocabulary"]:
        """Return the logits of a new MLM head for Z. Its output matrix is a parameter, not the word table."""
        dense = bert_dense(config.hidden_size, config, compute, "vocabulary_dense")
        features = bert_norm(config, "vocabulary_norm")(ACTIVATIONS[config.hidden_act](dense(interaction)))
        return bert_dense(config.vocab_size, config, compute, "vocabulary")(features).astype(jnp.float32)
