"""ME-BERT (Luan et al. 2021): the first tokens' vectors."""

from __future__ import annotations

from typing import ClassVar

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Head, Side, one_token


class FirstTokens(Head):
    """The last layer at the first m = `count` tokens, [CLS] being the first, V = m. With token "mean": the masked mean,
    then the first m - 1 tokens."""

    count: int = 8

    RENAMED: ClassVar[dict[str, str]] = {"count": "head.count"}

    def check(self) -> None:
        if self.count < 1:
            raise ValueError(f"head.first_tokens.count is {self.count}; a passage needs at least 1 vector")

    def vectors_per_passage(self) -> int:
        return self.count

    def vector_names(self) -> tuple[str, ...]:
        mean = self.token == "mean"
        return (*(["mean"] if mean else []), *(f"token {i}" for i in range(self.count - mean)))

    def keep(self, side: Side) -> Keep:
        if side == "query":
            return one_token(self.token, "last")
        mean = self.token == "mean"
        return Keep(self.count - mean, mean=mean, layers="last")
