"""MVR (Zhang et al. 2022): viewer tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import Side, VectorHead


class MvrHead(VectorHead):
    """n = `count` viewer tokens in place of [CLS], all at position 0, with the text from position 1 (MVR section 3.1).

    A passage's vectors are the last layer's states of the viewers, V = n; a query has the first viewer alone. Viewers
    are a new table, drawn from N(0, `deviation`^2), if `first_id` is -1; otherwise the word embeddings of `count` ids
    from `first_id` on. Because their position is the same, viewers differ by their embeddings only: with unused ids, or
    a deviation near that of word embeddings (0.02), the layers make one vector of them. So 1.0 is the default.
    """

    count: int = 8
    first_id: int = -1
    deviation: float = 1.0

    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ("token",)
    FREE: ClassVar[tuple[str, ...]] = ("deviation",)  # the table is a weight

    def check(self) -> None:
        if self.count < 1:
            raise ValueError(f"head.mvr.count is {self.count}; a passage needs at least 1 viewer")
        if self.deviation <= 0:
            raise ValueError(f"head.mvr.deviation is {self.deviation}; equal viewers stay equal: it is above 0")
        if self.first_id + self.count > self.vocab_size:
            raise ValueError(
                f"head.mvr.first_id is {self.first_id} and head.mvr.count {self.count}, but the vocabulary has "
                f"{self.vocab_size} words; -1 gives viewers a table of their own"
            )

    def needs(self) -> tuple[str, ...]:
        return ("prefix_tokens",)

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        if self.first_id < 0:
            return
        words = [tokenizer.backend.id_to_token(self.first_id + i) for i in range(self.count)]
        others = [word for word in words if word is not None and not word.startswith("[unused")]
        if others:
            raise ValueError(
                f"head.mvr.first_id is {self.first_id}, but in the tokenizer that is {others[0]!r}: viewers need "
                "words that no text has; choose others, or -1 for a table of their own"
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
        """Return the viewers, which replace [CLS]: ids [n] or embeddings [n,H]; n = 1 for queries."""
        count = self.prefix_length(side)
        if self.first_id >= 0:
            return self.first_id + jnp.arange(count)
        table = self.param("table", nn.initializers.normal(self.deviation), (self.count, self.hidden_size))
        return table[:count]

    def loss_settings(self) -> dict[str, Any]:
        return {"local_target": "argmax"}  # the local term asks for a clear winner, whichever it is (MVR eq. 7)
