"""The dual encoder (DPR, Karpukhin et al. 2020)."""

from __future__ import annotations

import flax.linen as nn

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Side, Text, one_token, require_token
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
