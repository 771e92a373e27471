"""Heads: HiddenStates -> Embeddings. One flat class a family; what a text's vectors are is decided here.

Unless a class says otherwise a query has one vector, from the last layer. `token` says which position stands for the
text: "cls" (the first token, as in BERT-based retrievers) or "mean" (the masked mean, as in sentence-transformers'
MiniLM and in T5, which has no [CLS]).

Every head has
    keep(side)               what it needs of the encoder
    vectors_per_passage()    V, or None: one for every token
    dimension(hidden_size)   D
    __call__(hidden, text)   Embeddings; `text` has the side, the tokens and the encoder, for heads that use it again
"""

from __future__ import annotations

from typing import Any

from jaxret.models.heads.all_tokens import AllTokens
from jaxret.models.heads.first_tokens import FirstTokens
from jaxret.models.heads.implicit import ImplicitInteraction
from jaxret.models.heads.last_layer import LastLayer
from jaxret.models.heads.layers import Layers
from jaxret.models.heads.lexical import LexicalAggregate
from jaxret.models.heads.viewers import Viewers

HEADS: dict[str, Any] = {
    "last_layer": LastLayer,
    "layers": Layers,
    "first_tokens": FirstTokens,
    "all_tokens": AllTokens,
    "viewers": Viewers,
    "lexical": LexicalAggregate,
    "implicit": ImplicitInteraction,
}
