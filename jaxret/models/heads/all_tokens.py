"""ColBERT (Khattab & Zaharia 2020): every token's vector."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Side, Text, one_token, require_token
from jaxret.types import Embeddings, HiddenStates


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
