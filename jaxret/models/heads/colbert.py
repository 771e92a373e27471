"""ColBERT (Khattab & Zaharia 2020): every token has a vector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import EVERY_TOKEN, HeadInput, Side, VectorHead, one_token_selection
from jaxret.models.heads.pylate import is_pylate, read_projection
from jaxret.types import Embeddings, HiddenStates, Params, Ragged, Tokens

# Query augmentation: fill queries up to their length limit with [MASK]s, whose states are vectors of the query.
# "unattended": no token attends to these [MASK]s (PyLate, ColBERT's later code). "attended": all tokens do.
EXPANSIONS = ("none", "unattended", "attended")


class ColbertHead(VectorHead):
    """V = T: the last layer's state of every token.

    Without `late`, a query has one vector (the baseline of the MLR paper). With token "mean", the mean of a passage
    then comes before its tokens. With `late`, every token of a query has a vector, and a score is the sum over query
    tokens of the maximum over passage tokens (ColBERT eq. 3).
    """

    projection: int = 0  # size of projected vectors; 0: no projection
    late: bool = False  # whether scores are by late interaction, which all fields below need
    query_marker: int = -1  # id of the token after [CLS], within the length limit ([Q] of the paper, 3.2); -1: none
    passage_marker: int = -1  # id of the token after [CLS] in passages ([D] of the paper); -1: none
    expansion: str = "none"  # query augmentation (3.2), one of EXPANSIONS
    mask_id: int = 103
    skiplist: tuple[int, ...] = ()  # ids of passage tokens that get no vector, such as punctuation (3.3)

    DIRECTORY_KEYS: ClassVar[tuple[str, ...]] = (
        "projection",
        "late",
        "query_marker",
        "passage_marker",
        "expansion",
        "mask_id",
        "skiplist",
    )

    def projections(self) -> tuple[str, ...]:
        return ("projection",) if self.projection else ()

    def stored_parameters(self, root: Path) -> Params:
        return {"projection": {"kernel": read_projection(root)}} if is_pylate(root) else {}

    def check(self) -> None:
        name = "head.colbert"
        if self.projection < 0:
            raise ValueError(f"{name}.projection is {self.projection}; it must be at least 1, or 0 for no projection")
        if self.expansion not in EXPANSIONS:
            raise ValueError(f"{name}.expansion is {self.expansion!r}; it must be one of {', '.join(EXPANSIONS)}")
        ids = {"query_marker": self.query_marker, "passage_marker": self.passage_marker, "mask_id": self.mask_id}
        for key, id in [*ids.items(), *(("skiplist", id) for id in self.skiplist)]:
            least = -1 if key in ("query_marker", "passage_marker") else 0
            is_used = key != "mask_id" or self.expansion != "none"
            if is_used and (type(id) is not int or not least <= id < self.vocab_size):
                raise ValueError(
                    f"{name}.{key} has {id!r}; ids of this vocabulary are {least} to {self.vocab_size - 1}"
                )
        late_only = {"query_marker": self.query_marker != -1, "passage_marker": self.passage_marker != -1}
        late_only |= {"expansion": self.expansion != "none", "skiplist": bool(self.skiplist)}
        if not self.late and (keys := [key for key, is_set in late_only.items() if is_set]):
            raise ValueError(f"{name}.{keys[0]} is set, but only late interaction uses it: set {name}.late=True")

    def needs(self) -> tuple[str, ...]:
        return () if self.late else super().needs()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        super().check_tokenizer(tokenizer)
        if self.expansion != "none" and tokenizer.mask_id != self.mask_id:
            raise ValueError(f"head.colbert.mask_id is {self.mask_id}, but [MASK] has the id {tokenizer.mask_id}")

    def pooling_problem(self, pooling: str) -> str:
        if self.late:
            return "needs the vectors of all tokens for late interaction"
        if pooling == "self_contrastive" and self.token not in ("cls", "mean"):
            return f"has no vector of head.token {self.token!r} before the vectors of tokens"
        return super().pooling_problem(pooling)

    def vectors_per_passage(self) -> None:
        return None

    def dimension(self) -> int:
        return self.projection or self.hidden_size

    def late_interaction(self) -> bool:
        return self.late

    def layers_of(self, side: Side) -> tuple[int, ...]:
        return (self.num_layers,)

    def token_of(self, side: Side, pooling: str) -> str:
        if self.late:
            return EVERY_TOKEN
        if side == "query" or pooling == "self_contrastive":
            return self.token
        if pooling == "average":  # the average of the tokens and of their mean equals the mean
            return "mean"
        return "" if self.token == "mean" else EVERY_TOKEN

    def contract(self) -> dict[str, Any]:
        keys = super().contract()
        return {key: value for key, value in keys.items() if not (self.late and key == "token")}  # unused by `late`

    def tokenizer_options(self) -> dict[str, Any]:
        markers = {"query": self.query_marker, "passage": self.passage_marker}
        options = {f"{side}_marker": None if id == -1 else id for side, id in markers.items()}
        return {**options, "expand_queries": self.expansion != "none"}

    def attention_tokens(self, tokens: Tokens, side: Side) -> Tokens:
        if side != "query" or not self.unattended_tokens():
            return tokens
        text = jnp.where(tokens.mask, tokens.ids, self.mask_id) != self.mask_id
        # A [MASK] before the last other token is part of the text.
        in_text = jnp.flip(jnp.cumsum(jnp.flip(text, axis=1), axis=1), axis=1) > 0
        return replace(tokens, mask=tokens.mask & in_text)

    def unattended_tokens(self) -> str:
        return "[MASK]s after a query" if self.expansion == "unattended" else ""

    def vector_mask(self, texts: Ragged, side: Side) -> np.ndarray:
        mask = super().vector_mask(texts, side)
        if side == "passage" and self.skiplist:
            mask &= ~np.isin(texts.flat, self.skiplist)
            mask[texts.offsets[:-1][texts.lengths > 0]] = True
        return mask

    def selection(self, side: Side) -> Selection:
        if self.late:
            return Selection(layers="last")
        if side == "query":
            return one_token_selection(self.token, "last")
        return Selection(mean=self.token == "mean", layers="last")

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        vectors, mask = hidden.states[-1], hidden.mask
        if self.projection:
            vectors = nn.Dense(
                self.projection,
                use_bias=False,
                precision=jax.lax.Precision.HIGHEST,
                kernel_init=nn.initializers.normal(0.02),
                name="projection",
            )(vectors.astype(jnp.float32))
        if self.late:
            mask = text.tokens.mask  # [MASK]s that no token attends to have vectors, too
        if self.skiplist and text.side == "passage":
            # Move the vectors before the skipped tokens, in order, because only the number of a text's vectors is
            # stored.
            counts = mask & ~self._skip_mask(text.tokens.ids)
            order = jnp.argsort(~counts, axis=1, stable=True)
            vectors = jnp.take_along_axis(vectors, order[..., None], axis=1)
            mask = jnp.take_along_axis(counts, order, axis=1)
        return Embeddings(vectors, mask)

    def _skip_mask(self, ids: Int[jax.Array, "B T"]) -> Bool[jax.Array, "B T"]:
        """Return a mask of the tokens without a vector. The first token always has one, so that no passage is empty."""
        return jnp.isin(ids, jnp.array(self.skiplist)) & (jnp.arange(ids.shape[1]) > 0)
