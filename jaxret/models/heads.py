"""Heads: HiddenStates -> Embeddings. One flat class a family; what a text's vectors are is decided here.

Unless a class says otherwise a query has one vector, from the last layer. `token` says which position stands for the
text: "cls" (the first token, as in BERT-based retrievers) or "mean" (the masked mean, as in sentence-transformers'
MiniLM and in T5, which has no [CLS]).

Every head has
    keep(side)               what it needs of the encoder
    vectors_per_passage()    V, or None: one for every token
    dimension(hidden_size)   D
    __call__(hidden, text)   Embeddings; `text` has the side, the tokens and the encoder, for heads that use it again
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.models.head import Side, Text, one_token, require_token
from jaxret.models.implicit import ImplicitInteraction
from jaxret.models.keep import Keep
from jaxret.models.lexical import LexicalAggregate
from jaxret.types import Embeddings, HiddenStates


class LastLayer(nn.Module):
    """Dual encoder (DPR): the last layer's vector for queries and passages, V = 1."""

    num_layers: int
    token: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.token)

    def vectors_per_passage(self) -> int:
        return 1

    def dimension(self, hidden_size: int) -> int:
        return hidden_size

    def keep(self, side: Side) -> Keep:
        return one_token(self.token, "last")

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)


class Layers(nn.Module):
    """MLR: a passage's vectors come from layers S = {l1 < ... < lm = L}, the last layer first (MLR eq. 3), V = m.

    Layer 0 is the output of the embeddings. The last layer must be in S, because the query is compared with it.
    """

    num_layers: int
    layers: tuple[int, ...]
    token: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.token)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"head.layers is {self.layers}; it must name different layers")
        if max(self.layers) != self.num_layers or min(self.layers) < 0:
            raise ValueError(
                f"head.layers is {self.layers}; layers are 0 (embeddings) to {self.num_layers}, "
                f"and the last one, {self.num_layers}, must be among them"
            )

    def vectors_per_passage(self) -> int:
        return len(self.layers)

    def dimension(self, hidden_size: int) -> int:
        return hidden_size

    def keep(self, side: Side) -> Keep:
        return one_token(self.token, "last" if side == "query" else "all")

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        if text.side == "query":
            return Embeddings(hidden.states[-1], hidden.mask)
        chosen = hidden.states[jnp.array(sorted(self.layers, reverse=True)), :, 0]  # [V,B,H]
        mask = jnp.broadcast_to(hidden.mask, (hidden.mask.shape[0], len(self.layers)))
        return Embeddings(jnp.moveaxis(chosen, 0, 1), mask)


class FirstTokens(nn.Module):
    """ME-BERT: the last layer at the first m = `count` tokens, [CLS] being the first, V = m. With token "mean" (T5):
    the masked mean, then the first m - 1 tokens."""

    num_layers: int
    count: int
    token: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.token)
        if self.count < 1:
            raise ValueError(f"head.count is {self.count}; a passage needs at least 1 vector")

    def vectors_per_passage(self) -> int:
        return self.count

    def dimension(self, hidden_size: int) -> int:
        return hidden_size

    def keep(self, side: Side) -> Keep:
        if side == "query":
            return one_token(self.token, "last")
        mean = self.token == "mean"
        return Keep(self.count - mean, mean=mean, layers="last")

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)


class AllTokens(nn.Module):
    """ColBERT: the last layer at every token, V = T, projected to `projection` numbers if that is not 0.

    The query is one vector (the papers' baseline), or every one of its tokens under `late_interaction`: its score is
    then the sum over query tokens of the maximum over passage tokens. With token "mean" and one query vector, the
    passage's mean comes before its tokens.
    """

    num_layers: int
    token: str = "cls"
    projection: int = 0
    late_interaction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.token)

    def vectors_per_passage(self) -> None:
        return None

    def dimension(self, hidden_size: int) -> int:
        return self.projection or hidden_size

    def keep(self, side: Side) -> Keep:
        if self.late_interaction:
            return Keep(layers="last")
        if side == "query":
            return one_token(self.token, "last")
        return Keep(mean=self.token == "mean", layers="last")

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        vectors = hidden.states[-1]
        if self.projection:
            vectors = nn.Dense(
                self.projection,
                use_bias=False,
                precision=jax.lax.Precision.HIGHEST,
                kernel_init=nn.initializers.normal(0.02),
                name="projection",
            )(vectors.astype(jnp.float32))
        return Embeddings(vectors, hidden.mask)


class Viewers(nn.Module):
    """MVR: n = `count` viewer tokens in place of [CLS], all at position 0, with the text from position 1; a passage's
    vectors are the last layer at the viewers, V = n. The query has the first viewer alone.

    Viewers are the word embeddings of `count` ids from `first_viewer_id` on (unused ones of BERT's vocabulary), or a
    table of their own, drawn with deviation 0.02, if `first_viewer_id` is -1.
    """

    num_layers: int
    hidden_size: int
    count: int
    first_viewer_id: int = 1

    def vectors_per_passage(self) -> int:
        return self.count

    def dimension(self, hidden_size: int) -> int:
        return hidden_size

    def keep(self, side: Side) -> Keep:
        return Keep(1 if side == "query" else self.count, layers="last")

    @nn.compact
    def leading(self, side: Side) -> jax.Array:
        """What replaces [CLS]: ids [n] or embeddings [n,H]; n = 1 for queries."""
        wanted = 1 if side == "query" else self.count
        if self.first_viewer_id >= 0:
            return self.first_viewer_id + jnp.arange(wanted)
        table = self.param("table", nn.initializers.normal(0.02), (self.count, self.hidden_size))
        return table[:wanted]

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)


HEADS: dict[str, Any] = {
    "last_layer": LastLayer,
    "layers": Layers,
    "first_tokens": FirstTokens,
    "all_tokens": AllTokens,
    "viewers": Viewers,
    "lexical": LexicalAggregate,
    "implicit": ImplicitInteraction,
}
