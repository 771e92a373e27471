"""MLR (Xie & Lukasiewicz): a passage is represented from several layers."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Side, Text, one_token, require_token
from jaxret.types import Embeddings, HiddenStates


class Layers(nn.Module):
    """MLR: a passage's vectors come from layers S = {l1 < ... < lm = L}, the last layer first (MLR eq. 3), V = m.

    Layer 0 is the output of the embeddings. The last layer must be in S, because the query is compared with it.
    """

    num_layers: int
    layers: tuple[int, ...]
    token: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.token)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"head.layers is {self.layers}; it must name different layers")
        if max(self.layers) != self.num_layers or min(self.layers) < 0:
            raise ValueError(
                f"head.layers is {self.layers}; layers are 0 (embeddings) to {self.num_layers}, "
                f"and the last one, {self.num_layers}, must be among them"
            )

    def vectors_per_passage(self) -> int:
        return len(self.layers)

    def dimension(self, hidden_size: int) -> int:
        return hidden_size

    def keep(self, side: Side) -> Keep:
        return one_token(self.token, "last" if side == "query" else "all")

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        if text.side == "query":
            return Embeddings(hidden.states[-1], hidden.mask)
        chosen = hidden.states[jnp.array(sorted(self.layers, reverse=True)), :, 0]  # [V,B,H]
        mask = jnp.broadcast_to(hidden.mask, (hidden.mask.shape[0], len(self.layers)))
        return Embeddings(jnp.moveaxis(chosen, 0, 1), mask)
