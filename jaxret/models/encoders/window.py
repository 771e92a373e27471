"""Masks of layers in which a token attends only to near tokens, or only to tokens before it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Int

FAR = np.iinfo(np.int32).max  # no bound


@dataclass(frozen=True)
class WindowMask:
    """A mask of the keys that each query attends to: real keys within a window around the query."""

    # Real keys [B,T]; in packed rows, keys of the same text for each query [B,T,T].
    keys: Bool[jax.Array, "B T"] | Bool[jax.Array, "B T T"]
    positions: Int[jax.Array, "*rows T"]  # positions of the tokens in their texts; prefix tokens share one
    # Largest distances of a key before (backward) and after its query (forward). Layers of a scan may differ.
    backward: Int[jax.Array, ""]
    forward: Int[jax.Array, ""]
    choices: tuple[tuple[int, int], ...]  # all values of (backward, forward) in the encoder's layers

    def within_window(
        self, queries: int, backward: int | jax.Array, forward: int | jax.Array
    ) -> Bool[jax.Array, "*rows Q T"]:
        """Return the keys within a window, padding included, for each of the first `queries` tokens."""
        distance = self.positions[..., :queries, None] - self.positions[..., None, :]  # from a key to a query after it
        return (distance <= backward) & (-distance <= forward)

    def dense(self, queries: int) -> Bool[jax.Array, "B Q T"]:
        """Return the mask of each of the first `queries` tokens."""
        keys = self.keys if self.keys.ndim == 3 else self.keys[:, None, :]
        return keys & self.within_window(queries, self.backward, self.forward)
