"""MLR (Xie & Lukasiewicz): several layers represent a passage."""

from __future__ import annotations

import jax.numpy as jnp

from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import HeadInput, Side, VectorHead, one_token_selection
from jaxret.types import Embeddings, HiddenStates


class MlrHead(VectorHead):
    """A passage's vectors come from layers S = {l1 < ... < lm = L} (MLR eq. 1), the last layer first, V = m.

    S must contain the last layer, because the query's vector comes from the last layer.
    """

    chosen: tuple[int, ...] = ()  # S; layer 0 is the output of the embeddings

    def check(self) -> None:
        if not all(type(layer) is int for layer in self.chosen):
            raise ValueError(f"head.mlr.chosen is {self.chosen}; layers must be whole numbers, as in (10, 12)")
        if not self.chosen or len(set(self.chosen)) != len(self.chosen):
            raise ValueError(f"head.mlr.chosen is {self.chosen}; it must name different layers")
        if max(self.chosen) != self.num_layers or min(self.chosen) < 0:
            raise ValueError(
                f"head.mlr.chosen is {self.chosen}; layers are 0 (embeddings) to {self.num_layers}, "
                f"and the last one, {self.num_layers}, must be among them"
            )

    def layers_of(self, side: Side) -> tuple[int, ...]:
        return (self.num_layers,) if side == "query" else tuple(sorted(self.chosen, reverse=True))

    def vectors_per_passage(self) -> int:
        return len(self.chosen)

    def vector_names(self) -> tuple[str, ...]:
        return tuple(f"layer {layer}" for layer in sorted(self.chosen, reverse=True))

    def selection(self, side: Side) -> Selection:
        return one_token_selection(self.token, "last" if side == "query" else "all")

    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        if text.side == "query":
            return Embeddings(hidden.states[-1], hidden.mask)
        states = hidden.states[jnp.array(sorted(self.chosen, reverse=True)), :, 0]  # [V,B,H]
        mask = jnp.broadcast_to(hidden.mask, (hidden.mask.shape[0], len(self.chosen)))
        return Embeddings(jnp.moveaxis(states, 0, 1), mask)
