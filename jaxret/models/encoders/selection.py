"""Selection of the hidden states that an encoder returns. For [CLS], it keeps [L+1,B,1,H] instead of [L+1,B,T,H]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.models.encoders.layout import TokenLayout
from jaxret.types import HiddenStates


@dataclass(frozen=True)
class Selection:
    """Positions and layers to return."""

    tokens: int | None = None  # number of positions, from [CLS] on; None: all
    mean: bool = False  # whether the mean over real tokens comes before the positions
    # Tokens of the mean: all, all but the first, or only the last. In a text of one token, "later" is this token.
    over: Literal["all", "later", "last"] = "all"
    layers: Literal["all", "last"] = "all"  # "all": L+1 states, from the embeddings to the last layer

    def last_layer_positions(self, length: int) -> int | None:
        """Return how many positions, from the first one, the last layer has to compute. None: all `length`
        positions."""
        return None if self.mean or self.tokens is None or self.tokens >= length else self.tokens

    def select(
        self, hidden: Float[jax.Array, "R queries H"], layout: TokenLayout
    ) -> tuple[Float[jax.Array, "N K H"], Bool[jax.Array, "N K"]]:
        """Return the selected positions of one layer's output. The output may have only the first
        `last_layer_positions`."""
        return self.select_positions(*layout.by_text(hidden, None if self.mean else self.tokens), layout.mean_mask)

    def select_positions(
        self,
        hidden: Float[jax.Array, "B queries H"],
        mask: Bool[jax.Array, "B T"],
        mean_mask: Bool[jax.Array, "B T"] | None = None,
    ) -> tuple[Float[jax.Array, "B K H"], Bool[jax.Array, "B K"]]:
        """Return the selected positions of states by text. A batch shorter than `tokens` gets masked zeros at the end,
        so that K does not depend on the batch.

        Args:
            hidden: states of each text.
            mask: real tokens.
            mean_mask: tokens that are part of the mean; None: all real tokens.
        """
        parts, masks = [hidden[:, : self.tokens]], [mask[:, : self.tokens]]
        if self.tokens is not None and self.tokens > hidden.shape[1]:
            missing_positions = self.tokens - hidden.shape[1]
            parts.append(jnp.zeros((hidden.shape[0], missing_positions, hidden.shape[2]), hidden.dtype))
            masks.append(jnp.zeros((hidden.shape[0], missing_positions), bool))
        if self.mean:
            counts = self._tokens_of_mean(mask)
            if mean_mask is not None and self.over != "last":
                counts &= mean_mask
            total = jnp.sum(jnp.where(counts[..., None], hidden, 0), axis=1, dtype=jnp.float32)
            mean = total / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
            parts.insert(0, mean.astype(hidden.dtype)[:, None])
            masks.insert(0, jnp.any(mask, axis=1, keepdims=True))
        return jnp.concatenate(parts, axis=1), jnp.concatenate(masks, axis=1)

    def _tokens_of_mean(self, mask: Bool[jax.Array, "B T"]) -> Bool[jax.Array, "B T"]:
        number = jnp.cumsum(mask, axis=1)  # number of real tokens up to each position
        count = number[:, -1:]
        if self.over == "last":
            return mask & (number == count)
        return mask & ((number > 1) | (count == 1)) if self.over == "later" else mask

    def collect(
        self,
        embeddings: Float[jax.Array, "R W H"],
        intermediate: Float[jax.Array, "below N K H"] | None,
        last: Float[jax.Array, "R queries H"],
        layout: TokenLayout,
    ) -> HiddenStates:
        """Return the hidden states that an encoder returns.

        Args:
            embeddings: output of the embeddings.
            intermediate: selected states of the layers below the last, from `Stack`; None: the encoder has one layer.
            last: output of the last layer, with its final norm.
            layout: layout of the batch.
        """
        state, positions = self.select(last, layout)
        if self.layers == "last":
            return HiddenStates(state[None], positions)
        first, _ = self.select(embeddings, layout)
        below = [] if intermediate is None else [intermediate]
        return HiddenStates(jnp.concatenate([first[None], *below, state[None]]), positions)
