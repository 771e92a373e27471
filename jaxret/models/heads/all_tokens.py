"""ColBERT (Khattab & Zaharia 2020): every token's vector."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Head, Side, Text, one_token
from jaxret.types import Embeddings, HiddenStates


class AllTokens(Head):
    """The last layer at every token, V = T, projected to `projection` numbers if that is not 0.

    The query is one vector (the MLR paper's baseline), or every one of its tokens under `late`: its score is then the
    sum over query tokens of the maximum over passage tokens (ColBERT eq. 3). With token "mean" and one query vector,
    the passage's mean comes before its tokens.
    """

    projection: int = 0
    late: bool = False

    RENAMED: ClassVar[dict[str, str]] = {"projection": "head.projection", "late": "head.late_interaction"}

    def check(self) -> None:
        if self.projection < 0:
            raise ValueError(f"head.all_tokens.projection is {self.projection}; 0 is the encoder's own size")

    def needs(self) -> tuple[str, ...]:
        return () if self.late else super().needs()

    def pooling_problem(self, pooling: str) -> str:
        return "needs every token's vector under late interaction" if self.late else super().pooling_problem(pooling)

    def vectors_per_passage(self) -> None:
        return None

    def dimension(self) -> int:
        return self.projection or self.hidden_size

    def late_interaction(self) -> bool:
        return self.late

    def contract(self) -> dict[str, Any]:
        found = super().contract()
        return {key: value for key, value in found.items() if not (self.late and key == "token")}  # every token is read

    def keep(self, side: Side) -> Keep:
        if self.late:
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
