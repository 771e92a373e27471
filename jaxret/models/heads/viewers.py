"""MVR (Zhang et al. 2022): viewer tokens."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import Side, Text
from jaxret.types import Embeddings, HiddenStates


class Viewers(nn.Module):
    """MVR: n = `count` viewer tokens in place of [CLS], all at position 0, with the text from position 1; a passage's
    vectors are the last layer at the viewers, V = n. The query has the first viewer alone.

    Viewers are the word embeddings of `count` ids from `first_viewer_id` on (unused ones of BERT's vocabulary), or a
    table of their own, drawn with deviation 0.02, if `first_viewer_id` is -1.
    """

    num_layers: int
    hidden_size: int
    count: int
    first_viewer_id: int = 1

    def vectors_per_passage(self) -> int:
        return self.count

    def dimension(self, hidden_size: int) -> int:
        return hidden_size

    def keep(self, side: Side) -> Keep:
        return Keep(1 if side == "query" else self.count, layers="last")

    @nn.compact
    def leading(self, side: Side) -> jax.Array:
        """What replaces [CLS]: ids [n] or embeddings [n,H]; n = 1 for queries."""
        wanted = 1 if side == "query" else self.count
        if self.first_viewer_id >= 0:
            return self.first_viewer_id + jnp.arange(wanted)
        table = self.param("table", nn.initializers.normal(0.02), (self.count, self.hidden_size))
        return table[:wanted]

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)
