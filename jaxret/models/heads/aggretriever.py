"""Aggretriever (Lin, Li & Lin 2023): weights of the vocabulary's words, aggregated over tokens and pruned to a few
hundred dimensions, and a projection of [CLS]."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import HeadInput, Side, VectorHead
from jaxret.models.heads.vocabulary import mlm_logits, one_hot_maximum, require_chunk, strongest, torch_linear
from jaxret.types import Embeddings, HiddenStates

PRUNINGS = ("full", "semi", "linear", "average")
FREE_IDS = 1000  # number of first ids of BERT's vocabulary that are special or unused, and may be dropped


def prune(values: Float[jax.Array, "B vocabulary"], dimension: int, mode: str) -> Float[jax.Array, "B agg"]:
    """Slice max pooling of the vocabulary to d = `dimension` numbers (Aggretriever eq. 4, 7).

    The size of the vocabulary becomes a multiple of the slice (2d for "full", d for "semi"). Its first ids are dropped,
    or, if these are more than FREE_IDS or all ids, it is padded with zeros at its end.

    "full": token t is in slot (t mod 2d) // 2. The slot's value is the larger one of the maximum over even tokens and
    the maximum over odd tokens; with a minus sign if the maximum over odd tokens is larger or both are equal.
    "semi": token t is in slot t mod d, whose value is the maximum.
    """
    width = 2 * dimension if mode == "full" else dimension
    surplus = values.shape[1] % width
    if surplus > FREE_IDS or values.shape[1] < width:
        values = jnp.pad(values, ((0, 0), (0, width - surplus)))
    else:
        values = values[:, surplus:]
    best = jnp.max(values.reshape(len(values), -1, width), axis=1)  # [B,width]
    if mode == "semi":
        return best
    plus, minus = best[:, 0::2], best[:, 1::2]
    return jnp.where(plus > minus, plus, -minus)


class AggretrieverHead(VectorHead):
    """V = 1: [agg ; W_cls h[L][0]] for queries and passages, of sizes `lexical_dim` and `cls_dim`.

    For tokens i >= 1: p_i = softmax of the encoder's MLM head, w_i = W h[L][i] + b (it may be negative), and
    v = max_i w_i p_i (Aggretriever eq. 2, 3). agg is v pruned to `lexical_dim`, by eq. 7 ("full") or eq. 4 ("semi").
    With token "mean", the mean over tokens replaces [CLS], and agg reads all tokens.
    """

    lexical_dim: int = 640  # size of the part of words; 0: no such part
    cls_dim: int = 128  # size of the part of [CLS]; 0: no such part
    # Besides "full" and "semi": "linear", a learned projection of v; "average", without words: a projection of the mean
    # of h[L][i] over the tokens i >= 1 (table 8, AVERAGE).
    pruning: str = "full"
    mlm: bool = True  # False, an ablation: p_i is 1 for token i itself, and 0 for all other words
    term_weights: bool = True  # False, an ablation: w_i is 1
    chunk: int = 16  # number of tokens at a time
    parts_weight: float = 0.5  # weight of a contrastive loss of each part, if there are two (section 3.3: lambda = 0.5)

    TOKENS: ClassVar[tuple[str, ...]] = ("cls", "mean")
    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ("parts_weight",)
    FREE: ClassVar[tuple[str, ...]] = ("chunk",)

    def check(self) -> None:
        if self.pruning not in PRUNINGS:
            raise ValueError(f"head.aggretriever.pruning is {self.pruning!r}; it must be one of {', '.join(PRUNINGS)}")
        if min(self.lexical_dim, self.cls_dim) < 0 or self.lexical_dim + self.cls_dim == 0:
            raise ValueError(
                f"head.aggretriever.lexical_dim is {self.lexical_dim} and head.aggretriever.cls_dim {self.cls_dim}: "
                "neither may be negative, and one must be above 0"
            )
        require_chunk("aggretriever", self.chunk)

    def needs(self) -> tuple[str, ...]:
        return (*super().needs(), *(["mlm_head"] if self.mlm and self.pruning != "average" else []))

    def cut_problem(self) -> str:
        return "joins slots of words and a part of [CLS], whose first dimensions alone have no meaning"

    def dimension(self) -> int:
        return self.lexical_dim + self.cls_dim

    def loss_settings(self) -> dict[str, Any]:
        if not (self.lexical_dim and self.cls_dim):
            return {}
        return {"parts": tuple(self.vector_parts().values()), "parts_weight": self.parts_weight}

    def vector_parts(self) -> dict[str, tuple[int, int]]:
        bounds = {"words": (0, self.lexical_dim), "[CLS]": (self.lexical_dim, self.lexical_dim + self.cls_dim)}
        return {name: (begin, end) for name, (begin, end) in bounds.items() if begin < end}

    @property
    def has_words(self) -> bool:
        """Return whether a part of the vector has entries for words of the vocabulary."""
        return self.lexical_dim > 0 and self.pruning != "average"

    def word_values(self, side: Side) -> str:
        return "weight of each word, before the vocabulary is pruned" if self.has_words else ""

    def selection(self, side: Side) -> Selection:
        return Selection(mean=self.token == "mean", layers="last")

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        states = hidden.states[-1]
        vectors = []
        if self.lexical_dim and not self.has_words:
            mean = masked_mean(states[:, 1:].astype(jnp.float32), hidden.mask[:, 1:])
            vectors.append(torch_linear(self.lexical_dim, self.hidden_size, "average")(mean))
        elif self.has_words:
            vectors.append(self.aggregate(states[:, 1:], hidden.mask[:, 1:], text))
        if self.cls_dim:
            first = states[:, 0].astype(jnp.float32)
            vectors.append(torch_linear(self.cls_dim, self.hidden_size, "cls")(first))
        return Embeddings(jnp.concatenate(vectors, axis=-1)[:, None], hidden.mask[:, :1])

    @nn.nowrap
    def aggregate(
        self, states: Float[jax.Array, "B T H"], mask: Bool[jax.Array, "B T"], text: HeadInput
    ) -> Float[jax.Array, "B agg"]:
        """Return the part of the vector that has entries for words: v = max_i w_i p_i (Aggretriever eq. 2, 3), pruned.

        `mask` says which of the states are those of real tokens. `text` has the encoder, for its MLM head.
        """
        weights = jnp.ones(mask.shape)
        if self.term_weights:
            weights = torch_linear(1, self.hidden_size, "term_weight")(states.astype(jnp.float32))[..., 0]
        if self.mlm:
            logits = mlm_logits(text.encoder)

            def probabilities(hidden: jax.Array) -> jax.Array:
                return jax.nn.softmax(logits(hidden), axis=-1)

            values = strongest(probabilities, states, weights, mask, self.chunk, text.train)
        else:
            ids = text.tokens.ids[:, -states.shape[1] :]
            values = one_hot_maximum(ids, weights, mask, text.encoder.config.vocab_size)
        self.sow("intermediates", "words", values[:, None])
        if self.pruning == "linear":
            return torch_linear(self.lexical_dim, values.shape[1], "lexical")(values)
        return prune(values, self.lexical_dim, self.pruning)


def masked_mean(states: Float[jax.Array, "B T H"], mask: Bool[jax.Array, "B T"]) -> Float[jax.Array, "B H"]:
    """Return the mean over real tokens, or zeros for a text without tokens."""
    total = jnp.sum(jnp.where(mask[..., None], states, 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
