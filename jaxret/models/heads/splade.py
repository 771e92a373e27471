"""SPLADE (Formal et al. 2021): a weight for every word of the vocabulary, nearly all of them 0. uniCOIL (Lin and Ma
2021): a weight for every word of the text."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import HeadInput, Side, VectorHead
from jaxret.models.heads.vocabulary import mlm_logits, one_hot_maximum, require_chunk, strongest, torch_linear
from jaxret.types import Embeddings, HiddenStates

# How a query's words are weighted. "encoded": by the encoder, like a passage's words. "words": 1 for each word of the
# text. "learned": a parameter for each word of the vocabulary, which starts at 1. Only "encoded" uses the encoder.
QUERY_ENCODINGS = ("encoded", "words", "learned")


class SpladeHead(VectorHead):
    """V = 1: w[t] >= 0 for each word t of the vocabulary. Words with positive weights are stored.

    With `expansion`, w[t] = log(1 + max(0, max_i logit_i[t])) over all real tokens i, with the logits of the encoder's
    MLM head (SPLADE v2, eq. 6). Without it, w[t] = max_i max(0, W h[L][i] + b) over the positions i of t in the text,
    without special tokens (uniCOIL, eq. 3).
    """

    expansion: bool = True
    queries: str = "encoded"  # one of QUERY_ENCODINGS
    special_ids: tuple[int, ...] = (0, 101, 102)  # ids of tokens that are not words of a text
    chunk: int = 16  # number of tokens at a time

    FREE: ClassVar[tuple[str, ...]] = ("chunk",)

    def check(self) -> None:
        if self.queries not in QUERY_ENCODINGS:
            raise ValueError(f"head.splade.queries is {self.queries!r}; it must be one of {', '.join(QUERY_ENCODINGS)}")
        require_chunk("splade", self.chunk)

    def needs(self) -> tuple[str, ...]:
        return ("mlm_head",) if self.expansion else ()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        if self.expansion and self.queries == "encoded":
            return  # special tokens have weights, too
        ids = {id for id in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) if id is not None}
        if missing_ids := sorted(ids - set(self.special_ids)):
            raise ValueError(
                f"head.splade.special_ids is {self.special_ids}, without the markers {missing_ids} of this tokenizer, "
                f"which are not words of a text; set it to {tuple(sorted(ids))}"
            )

    def cut_problem(self) -> str:
        return "gives a weight for each word, and a vector of only the first words has no meaning"

    def dimension(self) -> int:
        return self.vocab_size

    def sparse(self) -> bool:
        return True

    def word_values(self, side: Side) -> str:
        return "weight of each word"

    def selection(self, side: Side) -> Selection:
        return Selection(layers="last")

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        ids = text.tokens.ids
        words = text.tokens.mask & ~jnp.isin(ids, jnp.array(self.special_ids, jnp.int32))
        if text.side == "query" and self.queries != "encoded":
            weights = one_hot_maximum(ids, jnp.ones(ids.shape), words, self.vocab_size)
            if self.queries == "learned":
                table = self.param("word_weights", nn.initializers.ones, (self.vocab_size,))
                weights = weights * jax.nn.relu(table)
        elif self.expansion:
            weights = jnp.log1p(self.largest_logits(hidden.states[-1], hidden.mask, text))
        else:
            scalar = torch_linear(1, self.hidden_size, "term_weight")(hidden.states[-1].astype(jnp.float32))[..., 0]
            weights = one_hot_maximum(ids, jax.nn.relu(scalar), words, self.vocab_size)
        self.sow("intermediates", "words", weights[:, None])
        return Embeddings(weights[:, None], jnp.any(text.tokens.mask, axis=1, keepdims=True))

    @nn.nowrap
    def largest_logits(
        self, states: Float[jax.Array, "B T H"], mask: Bool[jax.Array, "B T"], text: HeadInput
    ) -> Float[jax.Array, "B vocabulary"]:
        """Return max(0, max_i logit_i[t]). The logarithm is monotone, so it is computed once, after the maximum."""
        return strongest(mlm_logits(text.encoder), states, jnp.ones(mask.shape), mask, self.chunk, text.train)

    def loss_settings(self) -> dict[str, Any]:
        return {"count_words": True}
