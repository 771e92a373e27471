"""MVR (Zhang et al. 2022): the states of viewer tokens are a passage's vectors."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import Side, VectorHead


class MvrHead(VectorHead):
    """V = n = `count`: the last layer's states of n viewer tokens, which replace [CLS]. A query has only the first
    viewer.

    All viewers are at position 0, and the text begins at position 1 (MVR section 3.1). Therefore viewers differ only by
    their embeddings. With unused ids, or with a deviation near that of word embeddings (0.02), the layers make the
    states of all viewers equal, so the default deviation is 1.0.
    """

    count: int = 8
    first_id: int = -1  # viewers are the ids from here on; -1: a new table of embeddings, from N(0, `deviation`^2)
    deviation: float = 1.0

    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ("token",)
    FREE: ClassVar[tuple[str, ...]] = ("deviation",)  # `deviation` only initializes the table

    def check(self) -> None:
        if self.count < 1:
            raise ValueError(f"head.mvr.count is {self.count}; a passage needs at least 1 viewer")
        if self.deviation <= 0:
            raise ValueError(
                f"head.mvr.deviation is {self.deviation}; it must be above 0, because equal viewers stay equal"
            )
        if self.first_id + self.count > self.vocab_size:
            raise ValueError(
                f"head.mvr.first_id is {self.first_id} and head.mvr.count {self.count}, but the vocabulary has "
                f"{self.vocab_size} words; -1 gives viewers new embeddings"
            )

    def needs(self) -> tuple[str, ...]:
        return ("prefix_tokens",)

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        if self.first_id < 0:
            return
        words = [tokenizer.backend.id_to_token(self.first_id + i) for i in range(self.count)]
        text_words = [word for word in words if word is not None and not word.startswith("[unused")]
        if text_words:
            raise ValueError(
                f"head.mvr.first_id is {self.first_id}, but the tokenizer has {text_words[0]!r} among these ids. "
                "Viewers need unused tokens: choose such an id, or -1 for new embeddings"
            )

    def pooling_problem(self, pooling: str) -> str:
        return "keeps every viewer's vector"

    def vectors_per_passage(self) -> int:
        return self.count

    def vector_names(self) -> tuple[str, ...]:
        return tuple(f"viewer {i}" for i in range(self.count))

    def prefix_length(self, side: Side) -> int:
        return 1 if side == "query" else self.count

    def selection(self, side: Side) -> Selection:
        return Selection(self.prefix_length(side), layers="last")

    @nn.compact
    def prefix_tokens(self, side: Side) -> jax.Array:
        """Return the viewers, which replace [CLS]: ids [n] or embeddings [n,H]. n is 1 for queries."""
        count = self.prefix_length(side)
        if self.first_id >= 0:
            return self.first_id + jnp.arange(count)
        table = self.param("table", nn.initializers.normal(self.deviation), (self.count, self.hidden_size))
        return table[:count]

    def loss_settings(self) -> dict[str, Any]:
        return {"local_target": "argmax"}  # the local term needs one best vector, no matter which (MVR eq. 7)
