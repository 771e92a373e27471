"""What every head is given, and the little they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxret.models.encoders.keep import Keep
from jaxret.types import Tokens

Side = Literal["query", "passage"]
TOKENS = ("cls", "mean")


@dataclass(frozen=True)
class Text:
    """What a head may need besides hidden states. labels [B,K]: token ids of each text's pseudo-query, -1 where there
    is none."""

    side: Side
    tokens: Tokens
    encoder: Any = None
    train: bool = False
    labels: jax.Array | None = None


def one_token(token: str, layers: Literal["all", "last"]) -> Keep:
    """The position that stands for the text."""
    return Keep(0, mean=True, layers=layers) if token == "mean" else Keep(1, layers=layers)


def require_token(token: str) -> None:
    if token not in TOKENS:
        raise ValueError(f"head.token is {token!r}; it must be one of {', '.join(TOKENS)}")
