"""Masks of layers in which a token attends to those near it, or to those before it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Int

FAR = np.iinfo(np.int32).max  # no bound


@dataclass(frozen=True)
class WindowMask:
    """The keys that each query attends to: those of `keys` that are near enough to it."""

    # real keys [B,T]; or keys of the same text for each query [B,T,T], in packed rows
    keys: Bool[jax.Array, "B T"] | Bool[jax.Array, "B T T"]
    positions: Int[jax.Array, "*rows T"]  # of the tokens in their texts; several may have one
    # backward, forward: how far before and after a query its keys may be; they may differ between the layers of a scan
    backward: Int[jax.Array, ""]
    forward: Int[jax.Array, ""]
    choices: tuple[tuple[int, int], ...]  # all values of (backward, forward) in the encoder's layers

    def near(self, queries: int, backward: int | jax.Array, forward: int | jax.Array) -> Bool[jax.Array, "*rows Q T"]:
        """Return the keys between two bounds, padding included, for each of the first `queries` tokens."""
        before = self.positions[..., :queries, None] - self.positions[..., None, :]  # how far a key is before a query
        return (before <= backward) & (-before <= forward)

    def dense(self, queries: int) -> Bool[jax.Array, "B Q T"]:
        """Return the mask of each of the first `queries` tokens."""
        keys = self.keys if self.keys.ndim == 3 else self.keys[:, None, :]
        return keys & self.near(queries, self.backward, self.forward)
