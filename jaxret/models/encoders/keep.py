"""Which hidden states leave an encoder. A retriever on [CLS] keeps [L+1,B,1,H] and never holds [L+1,B,T,H]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.models.encoders.layout import Layout
from jaxret.types import HiddenStates


@dataclass(frozen=True)
class Keep:
    """Positions and layers to return: the mean over real tokens first if `mean`, then the first `tokens` positions
    (None: all of them; [CLS] is the first). layers: "all" -> layer axis L+1, from the embeddings to the last layer;
    "last" -> 1."""

    tokens: int | None = None
    mean: bool = False
    layers: Literal["all", "last"] = "all"

    def first(self, length: int) -> int | None:
        """How many positions of the last layer are asked for, of a batch of `length`, where these are its first ones;
        None: all of them."""
        return None if self.mean or self.tokens is None or self.tokens >= length else self.tokens

    def of(
        self, hidden: Float[jax.Array, "R some H"], layout: Layout
    ) -> tuple[Float[jax.Array, "N K H"], Bool[jax.Array, "N K"]]:
        """Applies the choice of positions to one layer's output, as the layers have it; its `first` are enough."""
        return self.select(*layout.texts(hidden, None if self.mean else self.tokens))

    def select(
        self, hidden: Float[jax.Array, "B some H"], mask: Bool[jax.Array, "B T"]
    ) -> tuple[Float[jax.Array, "B K H"], Bool[jax.Array, "B K"]]:
        """Applies the choice of positions to states by text. A batch with fewer than `tokens` positions gives
        masked zeros for the rest, so K does not depend on it."""
        parts, masks = [hidden[:, : self.tokens]], [mask[:, : self.tokens]]
        if self.tokens is not None and self.tokens > hidden.shape[1]:
            missing = self.tokens - hidden.shape[1]
            parts.append(jnp.zeros((hidden.shape[0], missing, hidden.shape[2]), hidden.dtype))
            masks.append(jnp.zeros((hidden.shape[0], missing), bool))
        if self.mean:
            total = jnp.sum(jnp.where(mask[..., None], hidden, 0), axis=1, dtype=jnp.float32)
            mean = total / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
            parts.insert(0, mean.astype(hidden.dtype)[:, None])
            masks.insert(0, jnp.any(mask, axis=1, keepdims=True))
        return jnp.concatenate(parts, axis=1), jnp.concatenate(masks, axis=1)

    def collect(
        self,
        embedded: Float[jax.Array, "R W H"],
        kept: Float[jax.Array, "below N K H"] | None,
        last: Float[jax.Array, "R some H"],
        layout: Layout,
    ) -> HiddenStates:
        """An encoder's answer: what it chose of the embeddings, of every layer below the last (`kept`, as the stack
        gave it; None if there is nothing), and of the last layer's final form."""
        state, positions = self.of(last, layout)
        if self.layers == "last":
            return HiddenStates(state[None], positions)
        first, _ = self.of(embedded, layout)
        below = [] if kept is None else [kept]
        return HiddenStates(jnp.concatenate([first[None], *below, state[None]]), positions)
