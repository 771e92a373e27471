"""Heads: HiddenStates -> Embeddings. One flat class a family; what a document's vectors are is decided here.

A query always has one vector, from the last layer. `token` says which position stands for the text: "cls" (the first
token, as in BERT-based retrievers) or "mean" (the masked mean, as in sentence-transformers' MiniLM and in T5).
"""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp

from jaxret.models.keep import Keep
from jaxret.types import Embeddings, HiddenStates

Side = Literal["query", "passage"]
TOKENS = ("cls", "mean")


def _one_token(token: str, layers: Literal["all", "last"]) -> Keep:
    if token not in TOKENS:
        raise ValueError(f"head.token is {token!r}; it must be one of {', '.join(TOKENS)}")
    return Keep(0, mean=True, layers=layers) if token == "mean" else Keep(1, layers=layers)


class LastLayer(nn.Module):
    """Dual encoder (DPR): the last layer's vector for queries and passages, V = 1."""

    num_layers: int
    token: str = "cls"

    def vectors_per_passage(self) -> int:
        return 1

    def keep(self, side: Side) -> Keep:
        return _one_token(self.token, "last")

    def __call__(self, hidden: HiddenStates, side: Side) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)


class Layers(nn.Module):
    """MLR: a passage's vectors come from layers S = {l1 < ... < lm = L}, the last layer first (MLR eq. 3), V = m.

    Layer 0 is the output of the embeddings. The last layer must be in S, because the query is compared with it.
    """

    num_layers: int
    layers: tuple[int, ...]
    token: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"head.layers is {self.layers}; it must name different layers")
        if max(self.layers) != self.num_layers or min(self.layers) < 0:
            raise ValueError(
                f"head.layers is {self.layers}; layers are 0 (embeddings) to {self.num_layers}, "
                f"and the last one, {self.num_layers}, must be among them"
            )

    def vectors_per_passage(self) -> int:
        return len(self.layers)

    def keep(self, side: Side) -> Keep:
        return _one_token(self.token, "last" if side == "query" else "all")

    def __call__(self, hidden: HiddenStates, side: Side) -> Embeddings:
        if side == "query":
            return Embeddings(hidden.states[-1], hidden.mask)
        chosen = hidden.states[jnp.array(sorted(self.layers, reverse=True)), :, 0]  # [V,B,H]
        mask = jnp.broadcast_to(hidden.mask, (hidden.mask.shape[0], len(self.layers)))
        return Embeddings(jnp.moveaxis(chosen, 0, 1), mask)


HEADS: dict[str, Any] = {"last_layer": LastLayer, "layers": Layers}
