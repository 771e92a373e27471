"""Where the tokens of texts lie in what an encoder's layers compute: a text a row, with padding; or, packed, one after
the other in rows that hold several. What leaves the encoder is the same: states by text and position.

A layer needs to know it in three places: what a token may see, where its position is looked up, and what dropout
draws. All three follow a token's text and its place in it, so packing changes nothing but the order of sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int, Shaped

from jaxret.types import Tokens


@struct.dataclass
class Places:
    """Of packed texts. starts: where each begins, rows laid end to end; text, slot: which text is at each place of the
    rows (-1: none), and which of its tokens."""

    starts: Int[jax.Array, " N"]
    text: Int[jax.Array, "R W"]
    slot: Int[jax.Array, "R W"]


@struct.dataclass
class Spots:
    """What dropout's masks follow in packed rows. rows: of the texts in the whole batch; length: of a text, padded;
    asked: tokens of a text whose attention is drawn for, the others are not read."""

    rows: Int[jax.Array, " N"]
    places: Places
    length: int = struct.field(pytree_node=False)
    asked: int = struct.field(pytree_node=False)


# What dropout's masks follow: rows of texts in the whole batch, of a text a row or of packed ones; None: nothing is
# dropped.
Rows: TypeAlias = Int[jax.Array, " B"] | Spots | None


@struct.dataclass
class Layout:
    """mask: the real tokens of every text, with the slots that replace the first. places: None if a text is a row."""

    mask: Bool[jax.Array, "N T"]
    places: Places | None = None

    @classmethod
    def of(cls, tokens: Tokens, leading: jax.Array | None = None) -> Layout:
        """leading: what replaces the first token, of which only the number matters here."""
        mask = tokens.mask if leading is None else repeat_first(tokens.mask, len(leading))
        if tokens.packing is None:
            return cls(mask)
        starts, shape = tokens.packing.starts, (tokens.packing.rows, tokens.packing.width)
        place = jnp.arange(shape[0] * shape[1])
        text = jnp.sum(starts[None] <= place[:, None], axis=1) - 1  # starts rise; the last that is not behind
        slot = place - starts[text]
        there = (text >= 0) & (slot < jnp.sum(mask, axis=1)[text])
        text, slot = jnp.where(there, text, -1), jnp.where(there, slot, 0)
        return cls(mask, Places(starts, text.reshape(shape), slot.reshape(shape)))

    @property
    def seen(self) -> Bool[jax.Array, "N T"] | Bool[jax.Array, "R W W"]:
        """What may be attended to: the real tokens of a text; in packed rows by each token, those of its own."""
        if self.places is None:
            return self.mask
        text = self.places.text
        return (text[:, :, None] == text[:, None, :]) & (text >= 0)[:, None, :]

    def rows(self, rows: Int[jax.Array, " N"] | None) -> Rows:
        """Of texts in the whole batch -> what dropout in these rows follows."""
        if rows is None or self.places is None:
            return rows
        return Spots(rows, self.places, self.mask.shape[1], self.mask.shape[1])

    def place(self, of_tokens: Int[jax.Array, "*N T"]) -> Int[jax.Array, "*R W"]:
        """A number of each token of each text (or of all texts) -> where the layers have that token."""
        if self.places is None:
            return of_tokens
        return jnp.broadcast_to(of_tokens, self.mask.shape)[self.places.text, self.places.slot]

    def embed(self, table: Any, ids: Int[jax.Array, "N words"], leading: jax.Array | None) -> Float[jax.Array, "R W H"]:
        """Word embeddings (`table` looks them up), with the first token's replaced by `leading`: ids [n], or word
        embeddings [n,H]."""
        if leading is None:
            return table(self.place(ids))
        slots = table(leading) if leading.ndim == 1 else leading
        if self.places is None:
            slots = jnp.broadcast_to(slots[None], (len(ids), *slots.shape))
            return jnp.concatenate([slots, table(ids)[:, 1:]], axis=1)
        words = table(self.place(repeat_first(ids, len(slots))))
        slot = self.places.slot
        return jnp.where((slot < len(slots))[..., None], slots[jnp.minimum(slot, len(slots) - 1)], words)

    def asked(
        self, hidden: Float[jax.Array, "R W H"], rows: Rows, first: int | None
    ) -> tuple[Float[jax.Array, "R some H"], Rows]:
        """Of the last layer: the `first` positions of each text (None: all), and what dropout follows there. Packed
        rows are computed whole, because texts begin everywhere in them."""
        if self.places is None or first is None:
            return hidden[:, :first], rows
        return hidden, replace(rows, asked=first) if isinstance(rows, Spots) else rows

    def texts(
        self, hidden: Float[jax.Array, "R some H"], count: int | None
    ) -> tuple[Float[jax.Array, "N K H"], Bool[jax.Array, "N K"]]:
        """The first `count` states of each text (None: all), and which are real; packed texts have 0 for the others."""
        mask = self.mask[:, :count]
        if self.places is None:
            return hidden[:, :count], mask
        flat = hidden.reshape(-1, hidden.shape[-1])
        places = jnp.where(mask, self.places.starts[:, None] + jnp.arange(mask.shape[1]), len(flat))
        return flat.at[places].get(mode="fill", fill_value=0), mask


def repeat_first(row: Shaped[jax.Array, "*B T"], count: int) -> Shaped[jax.Array, "*B slots"]:
    """What `count` slots in the place of the first token make of a mask, or of positions: they all have its own."""
    return jnp.concatenate([jnp.repeat(row[..., :1], count, axis=-1), row[..., 1:]], axis=-1)
