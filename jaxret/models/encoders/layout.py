"""Positions of the tokens of texts in an encoder's layers: padded (a text per row) or packed (several texts per row).

In both cases, the encoder returns hidden states by text and position. A layer depends on the layout in three ways: the
tokens that a token may attend to, its position embedding, and its dropout mask. All three depend on the token's text
and on its position in that text, so packing changes only the order of sums. So layers take the layout in place of a
mask: `Stack` applies a layer to its parameters alone, in a loop, and in the last layer the layout is another one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int, Shaped

from jaxret.types import Tokens


@struct.dataclass
class PackedPositions:
    """Positions of packed texts in R rows of W tokens."""

    starts: Int[jax.Array, " N"]  # index of the first token of each text in the concatenated rows
    text: Int[jax.Array, "R W"]  # index of the text at each position; -1: none
    token: Int[jax.Array, "R W"]  # index of the token in that text


@struct.dataclass
class TokenLayout:
    """Layout of a batch of N texts of up to T tokens."""

    mask: Bool[jax.Array, "N T"]  # real tokens, prefix tokens included
    batch_rows: Int[jax.Array, " N"] | None = None  # row of each text in the full batch, for dropout; None: no dropout
    packing: PackedPositions | None = None  # None: a text per row
    # In packed rows: the number of first tokens of a text that are queries of the last layer. It is an axis of the
    # dropout mask of attention weights. None: all T.
    queries: int | None = struct.field(pytree_node=False, default=None)
    mean_mask: Bool[jax.Array, "N T"] | None = None  # tokens that are part of a mean; None: all real tokens

    @classmethod
    def of(cls, tokens: Tokens, train: bool = False, prefix: jax.Array | None = None) -> TokenLayout:
        """Return the layout of a batch. `prefix` replaces the first token; only its length is read."""
        mask = tokens.mask if prefix is None else repeat_first(tokens.mask, len(prefix))
        rows = jnp.arange(len(tokens.ids)) if tokens.rows is None else tokens.rows
        layout = cls(mask, rows if train else None, mean_mask=tokens.mean_mask)
        if tokens.packing is None:
            return layout
        starts, shape = tokens.packing.starts, (tokens.packing.rows, tokens.packing.width)
        position = jnp.arange(shape[0] * shape[1])
        text = jnp.sum(starts[None] <= position[:, None], axis=1) - 1  # starts are in ascending order
        token = position - starts[text]
        real = (text >= 0) & (token < jnp.sum(mask, axis=1)[text])
        text, token = jnp.where(real, text, -1), jnp.where(real, token, 0)
        return layout.replace(packing=PackedPositions(starts, text.reshape(shape), token.reshape(shape)))  # type: ignore[attr-defined]

    @property
    def attention_mask(self) -> Bool[jax.Array, "N T"] | Bool[jax.Array, "R W W"]:
        """Mask of the keys that may be attended to: the real tokens of a text; in packed rows, a mask for each
        token."""
        if self.packing is None:
            return self.mask
        text = self.packing.text
        return (text[:, :, None] == text[:, None, :]) & (text >= 0)[:, None, :]

    def arrange(self, values: Int[jax.Array, "*N T"]) -> Int[jax.Array, "*R W"]:
        """Return a value per token, given for each text or for all texts, at the positions of the layers."""
        if self.packing is None:
            return values
        return jnp.broadcast_to(values, self.mask.shape)[self.packing.text, self.packing.token]

    def embed(self, table: Any, ids: Int[jax.Array, "N words"], prefix: jax.Array | None) -> Float[jax.Array, "R W H"]:
        """Return word embeddings at the positions of the layers, float32.

        Args:
            table: module that looks up ids; a frozen table may be bfloat16.
            ids: ids of the tokens, without prefix tokens.
            prefix: ids [n] or word embeddings [n,H] that replace the first token; None: no replacement.
        """

        def look_up(ids: jax.Array) -> jax.Array:
            return table(ids).astype(jnp.float32)

        if prefix is None:
            return look_up(self.arrange(ids))
        prefix_vectors = look_up(prefix) if prefix.ndim == 1 else prefix
        if self.packing is None:
            prefix_vectors = jnp.broadcast_to(prefix_vectors[None], (len(ids), *prefix_vectors.shape))
            return jnp.concatenate([prefix_vectors, look_up(ids)[:, 1:]], axis=1)
        words = look_up(self.arrange(repeat_first(ids, len(prefix_vectors))))
        token = self.packing.token
        return jnp.where(
            (token < len(prefix_vectors))[..., None], prefix_vectors[jnp.minimum(token, len(prefix_vectors) - 1)], words
        )

    def last_layer_queries(
        self, hidden: Float[jax.Array, "R W H"], first: int | None
    ) -> tuple[Float[jax.Array, "R queries H"], TokenLayout]:
        """Return the queries of the last layer, the `first` positions of each text (None: all), and their layout.

        In packed rows, all positions are computed, because texts begin anywhere.
        """
        if self.packing is None or first is None:
            return hidden[:, :first], self
        return hidden, self.replace(queries=first)  # type: ignore[attr-defined]

    def by_text(
        self, hidden: Float[jax.Array, "R some H"], count: int | None
    ) -> tuple[Float[jax.Array, "N K H"], Bool[jax.Array, "N K"]]:
        """Return the first `count` states of each text (None: all), and a mask of real tokens. Packed texts have 0 for
        other tokens."""
        mask = self.mask[:, :count]
        if self.packing is None:
            return hidden[:, :count], mask
        flat = hidden.reshape(-1, hidden.shape[-1])
        positions = jnp.where(mask, self.packing.starts[:, None] + jnp.arange(mask.shape[1]), len(flat))
        return flat.at[positions].get(mode="fill", fill_value=0), mask


def repeat_first(row: Shaped[jax.Array, "*B T"], count: int) -> Shaped[jax.Array, "*B longer"]:
    """Return a mask, ids or positions in which the first entry occurs `count` times, once for each prefix token."""
    return jnp.concatenate([jnp.repeat(row[..., :1], count, axis=-1), row[..., 1:]], axis=-1)
