"""Random batches, packed as in a run with tokens.packing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxret.data.tokens.batches import packed_tokens
from jaxret.data.tokens.packing import Packer, choose_row_shape
from jaxret.types import Batch, Ragged, Tokens


def texts_of(tokens: Tokens) -> Ragged:
    """Return every row without its padding."""
    return Ragged.from_lists([ids[mask].tolist() for ids, mask in zip(np.asarray(tokens.ids), np.asarray(tokens.mask))])


def pack(batch: Batch, bins: int, head: Any) -> Batch:
    """Pack the texts of a batch into rows of `bins` bins, with room for the slots of `head`."""
    texts = [texts_of(tokens) for tokens in (batch.queries, batch.passages)]
    lengths = [tokens.ids.shape[1] for tokens in (batch.queries, batch.passages)]
    slots = head.prefix_length("query"), head.prefix_length("passage")
    sides = [choose_row_shape([t.lengths], n, s, bins, head.hidden_size) for t, n, s in zip(texts, lengths, slots)]
    packer = Packer(bins, *sides)
    places = packer(*(t.lengths for t in texts))
    queries, passages = (
        packed_tokens(t, np.arange(len(t)), slice(None), side, placed, 0)
        for t, side, placed in zip(texts, sides, places)
    )
    labels = None if batch.pseudo_queries is None else batch.pseudo_queries[places[1].order]
    return dataclasses.replace(batch, queries=queries, passages=passages, pseudo_queries=labels)
