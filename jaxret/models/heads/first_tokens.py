"""ME-BERT (Luan et al. 2021): the first tokens' vectors."""

from __future__ import annotations

import flax.linen as nn

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Side, Text, one_token, require_token
from jaxret.types import Embeddings, HiddenStates


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
