"""ColBERT (Khattab & Zaharia 2020): every token's vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.keep import Keep
from jaxret.models.heads.head import EACH, Head, Side, Text, one_token
from jaxret.types import Embeddings, HiddenStates, Ragged, Tokens

# What follows a query up to its length limit: nothing; or [MASK]s, whose states are vectors of the query like any
# other. "unattended": no token attends to them (PyLate, ColBERT's later code); "attended": all do.
EXPANSIONS = ("none", "unattended", "attended")


class AllTokens(Head):
    """The last layer at every token, V = T, projected to `projection` numbers if that is not 0.

    The query is one vector (the MLR paper's baseline), or every one of its tokens under `late`: its score is then the
    sum over query tokens of the maximum over passage tokens (ColBERT eq. 3). With token "mean" and one query vector,
    the passage's mean comes before its tokens.

    Under `late`: `query_marker` and `passage_marker` are ids that come after [CLS], counted by the length limits, -1:
    none ([Q] and [D] of the paper, 3.2). `expansion`: query augmentation (3.2). Passage tokens with an id of `skiplist`
    (punctuation, 3.3) are read but no vectors.
    """

    projection: int = 0
    late: bool = False
    query_marker: int = -1
    passage_marker: int = -1
    expansion: str = "none"
    mask_id: int = 103
    skiplist: tuple[int, ...] = ()

    STATED: ClassVar[tuple[str, ...]] = (
        "projection",
        "late",
        "query_marker",
        "passage_marker",
        "expansion",
        "mask_id",
        "skiplist",
    )
    PROJECTION: ClassVar[str] = "projection"
    RENAMED: ClassVar[dict[str, str]] = {"projection": "head.projection", "late": "head.late_interaction"}
    ABSENT: ClassVar[dict[str, Any]] = {
        "query_marker": -1,
        "passage_marker": -1,
        "expansion": "none",
        "mask_id": 103,
        "skiplist": [],
    }

    def check(self) -> None:
        name = "head.all_tokens"
        if self.projection < 0:
            raise ValueError(f"{name}.projection is {self.projection}; 0 is the encoder's own size")
        if self.expansion not in EXPANSIONS:
            raise ValueError(f"{name}.expansion is {self.expansion!r}; it must be one of {', '.join(EXPANSIONS)}")
        ids = {"query_marker": self.query_marker, "passage_marker": self.passage_marker, "mask_id": self.mask_id}
        for key, id in [*ids.items(), *(("skiplist", id) for id in self.skiplist)]:
            least = -1 if key in ("query_marker", "passage_marker") else 0
            used = key != "mask_id" or self.expansion != "none"
            if used and (type(id) is not int or not least <= id < self.vocab_size):
                raise ValueError(
                    f"{name}.{key} has {id!r}; ids of this vocabulary are {least} to {self.vocab_size - 1}"
                )
        told = {"query_marker": self.query_marker != -1, "passage_marker": self.passage_marker != -1}
        told |= {"expansion": self.expansion != "none", "skiplist": bool(self.skiplist)}
        if not self.late and (keys := [key for key, given in told.items() if given]):
            raise ValueError(f"{name}.{keys[0]} is set, which only late interaction has: set {name}.late=True")

    def needs(self) -> tuple[str, ...]:
        return () if self.late else super().needs()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        super().check_tokenizer(tokenizer)
        if self.expansion != "none" and tokenizer.mask_id != self.mask_id:
            raise ValueError(f"head.all_tokens.mask_id is {self.mask_id}, but [MASK] has the id {tokenizer.mask_id}")

    def pooling_problem(self, pooling: str) -> str:
        return "needs every token's vector under late interaction" if self.late else super().pooling_problem(pooling)

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
            return EACH
        if side == "query" or pooling == "self_contrastive":
            return self.token
        if pooling == "average":  # of tokens and of their mean alike
            return "mean"
        return EACH if self.token == "cls" else ""

    def contract(self) -> dict[str, Any]:
        found = super().contract()
        return {key: value for key, value in found.items() if not (self.late and key == "token")}  # every token is read

    def text_options(self) -> dict[str, Any]:
        markers = {"query": self.query_marker, "passage": self.passage_marker}
        found = {f"{side}_marker": None if id == -1 else id for side, id in markers.items()}
        return {**found, "expand_queries": self.expansion != "none"}

    def seen(self, tokens: Tokens, side: Side) -> Tokens:
        if side != "query" or not self.unseen():
            return tokens
        text = jnp.where(tokens.mask, tokens.ids, self.mask_id) != self.mask_id
        before = jnp.flip(jnp.cumsum(jnp.flip(text, axis=1), axis=1), axis=1) > 0  # a [MASK] of the text is in it
        return replace(tokens, mask=tokens.mask & before)

    def unseen(self) -> str:
        return "[MASK]s after a query" if self.expansion == "unattended" else ""

    def kept(self, texts: Ragged, side: Side) -> np.ndarray:
        found = super().kept(texts, side)
        if side == "passage" and self.skiplist:
            found &= ~np.isin(texts.flat, self.skiplist)
            found[texts.offsets[:-1][texts.lengths > 0]] = True
        return found

    def keep(self, side: Side) -> Keep:
        if self.late:
            return Keep(layers="last")
        if side == "query":
            return one_token(self.token, "last")
        return Keep(mean=self.token == "mean", layers="last")

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
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
            mask = text.tokens.mask  # also what no token attends to
        if self.skiplist and text.side == "passage":
            # Those that count come first, in their order: the number of a text's vectors is what is kept of it.
            counts = mask & ~self._skipped(text.tokens.ids)
            order = jnp.argsort(~counts, axis=1, stable=True)
            vectors = jnp.take_along_axis(vectors, order[..., None], axis=1)
            mask = jnp.take_along_axis(counts, order, axis=1)
        return Embeddings(vectors, mask)

    def _skipped(self, ids: Int[jax.Array, "B T"]) -> Bool[jax.Array, "B T"]:
        """Which tokens are no vectors; the first always is one, so that every passage has some."""
        return jnp.isin(ids, jnp.array(self.skiplist)) & (jnp.arange(ids.shape[1]) > 0)
