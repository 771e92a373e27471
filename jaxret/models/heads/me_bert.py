"""ME-BERT (Luan et al. 2021): the states of the first tokens are a passage's vectors."""

from __future__ import annotations

from typing import ClassVar

from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import Side, VectorHead, one_token_selection


class MeBertHead(VectorHead):
    """V = m = `count`: the last layer's states of the first m tokens, [CLS] included.

    With token "mean", a query is the mean over its tokens. A passage then has the mean and the states of its first m -
    1 tokens, or, without `mean_vector`, the states of its first m tokens (MLR, footnote 4).
    """

    count: int = 8
    mean_vector: bool = True

    TOKENS: ClassVar[tuple[str, ...]] = ("cls", "mean")

    def check(self) -> None:
        if self.count < 1:
            raise ValueError(f"head.me_bert.count is {self.count}; a passage needs at least 1 vector")

    @property
    def has_mean(self) -> bool:
        """Return whether a passage's first vector is the mean over its tokens."""
        return self.token == "mean" and self.mean_vector

    def needs(self) -> tuple[str, ...]:
        return "leading_tokens", *super().needs()

    def vectors_per_passage(self) -> int:
        return self.count

    def vector_names(self) -> tuple[str, ...]:
        mean = self.has_mean
        return (*(["mean"] if mean else []), *(f"token {i}" for i in range(self.count - mean)))

    def selection(self, side: Side) -> Selection:
        if side == "query":
            return one_token_selection(self.token, "last")
        mean = self.has_mean
        return Selection(self.count - mean, mean=mean, layers="last")
