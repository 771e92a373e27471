"""The interface of heads. A family is one file, one line in the table of `heads/__init__.py`, and a group of keys in
configs/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import numpy as np

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.selection import Selection
from jaxret.types import Embeddings, HiddenStates, Params, Ragged, Tokens

Side = Literal["query", "passage"]
TOKENS = ("cls", "mean", "last", "mean_without_first")
EVERY_TOKEN = "each"  # used instead of one of TOKENS if the state of every token is a vector
NOT_KEYS = ("num_layers", "hidden_size", "vocab_size", "parent", "name")  # fields that are not keys of the config


@dataclass(frozen=True)
class HeadInput:
    """The input of a head besides hidden states."""

    side: Side
    tokens: Tokens  # padded tokens, at the positions of the states
    encoder: Any = None  # the encoder's module
    train: bool = False
    labels: jax.Array | None = None  # [B,K] token ids of each text's pseudo-query; -1: no token


def one_token_selection(token: str, layers: Literal["all", "last"]) -> Selection:
    """Return the selection of the state that represents the text, for one of TOKENS."""
    if token == "cls":
        return Selection(1, layers=layers)
    over: dict[str, Literal["all", "later", "last"]] = {"mean": "all", "mean_without_first": "later", "last": "last"}
    return Selection(0, mean=True, over=over[token], layers=layers)


class VectorHead(nn.Module):
    """HiddenStates -> Embeddings: the vectors of texts.

    A family has the four fields below and the keys of its group in the config, `head.<name>.<field>`. By default, a
    text has one vector, the last layer's state at `token`, and the contrastive loss is the only loss. A family
    overrides methods and has no subclasses.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    # The state that represents the text. "cls": of the first token; "mean": mean over the real tokens; "last": of the
    # last token; "mean_without_first": mean over the tokens after the first.
    token: str = "cls"

    # Fields that change no vector, such as weights of losses.
    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ()
    # Fields that change no result of a run that has begun, such as memory and initialization.
    FREE: ClassVar[tuple[str, ...]] = ()
    TOKENS: ClassVar[tuple[str, ...]] = TOKENS  # allowed values of `token`
    # Whether the standard modules of sentence-transformers can compute the family's vectors. If so, the settings in a
    # directory of sentence-transformers become keys of the family.
    STOCK: ClassVar[bool] = False
    # Fields that are set by a directory with a model of this family from another library.
    DIRECTORY_KEYS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token not in self.TOKENS:
            raise ValueError(f"head.token is {self.token!r}; it must be one of {', '.join(self.TOKENS)}")
        self.check()

    # Requirements

    def check(self) -> None:
        """Raise ValueError for invalid settings."""

    def needs(self) -> tuple[str, ...]:
        """Return the encoder abilities (`encoders.protocol.ABILITIES`) that this head needs."""
        return ("cls",) if self.token == "cls" else ()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer that does not fit."""
        if "cls" in self.needs() and tokenizer.cls_id is None:
            raise ValueError("head.token is 'cls', but the tokenizer has no [CLS]; set head.token='mean' or 'last'")

    def pooling_problem(self, pooling: str) -> str:
        """Return the reason why the head's vectors cannot be pooled by `pooling`; "" if they can."""
        vectors = self.vectors_per_passage()
        if vectors == 1:
            return "gives one vector"
        if vectors is None and pooling == "scalar_mix":
            return "has a vector for every token, so the number of weights is not fixed"
        return ""

    def cut_problem(self) -> str:
        """Return the reason why vectors cannot be shortened to their first dimensions; "" if they can."""
        return ""

    # Shapes

    def vectors_per_passage(self) -> int | None:
        """Return V, the number of vectors of a passage before pooling; None: a vector for every token."""
        return 1

    def dimension(self) -> int:
        """Return D, the size of one vector."""
        return self.hidden_size

    def late_interaction(self) -> bool:
        """Return whether every token of a query has a vector, and a score is the sum of the maxima of these vectors."""
        return False

    def projections(self) -> tuple[str, ...]:
        """Return the names of the linear layers, without biases, that all vectors go through, in order."""
        return ()

    def sparse(self) -> bool:
        """Return whether a vector has a weight for every word of the vocabulary, nearly all of them 0. No weight is
        negative. Words and weights are stored."""
        return False

    def vector_names(self) -> tuple[str, ...]:
        """Return the names of a passage's V vectors; () if V is 1, or if every token has a vector."""
        return ()

    def layers_of(self, side: Side) -> tuple[int, ...]:
        """Return the layers whose states at a token are the vectors, in order; () if vectors are not such states."""
        return ()

    def token_of(self, side: Side, pooling: str) -> str:
        """Return the token whose states are the vectors after pooling: one of TOKENS, or EVERY_TOKEN; "": none of
        these. It is only called if `layers_of` returns layers."""
        return self.token

    # From text to vectors

    def tokenizer_options(self) -> dict[str, Any]:
        """Return the fields of `TextTokenizer` that the family sets."""
        return {}

    def attention_tokens(self, tokens: Tokens, side: Side) -> Tokens:
        """Return the tokens for the encoder, whose mask says which tokens may be attended to."""
        return tokens

    def unattended_tokens(self) -> str:
        """Return a description, for errors, of the tokens that no token attends to; "": there are no such tokens."""
        return ""

    def vector_mask(self, texts: Ragged, side: Side) -> np.ndarray:
        """Return a mask of the tokens of texts that have vectors, bool [R], for families with a vector for every
        token."""
        return np.ones(len(texts.flat), bool)

    def selection(self, side: Side) -> Selection:
        """Return the selection of the hidden states that the head needs."""
        return one_token_selection(self.token, "last")

    def prefix_tokens(self, side: Side) -> jax.Array | None:
        """Return n tokens that replace the first token: ids [n] or word embeddings [n,H]; None: no replacement."""
        return None

    def prefix_length(self, side: Side) -> int:
        """Return n, the number of prefix tokens, which makes texts n - 1 tokens longer in the encoder."""
        return 1

    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)

    def stored_parameters(self, root: Path) -> Params:
        """Return the parameters of the head that a directory of another library has; {}: none."""
        return {}

    def initial_parameters(self, encoder: Any, weights: Params) -> Params:
        """Return the parameters whose initial values are from the pre-trained `encoder` with `weights`; {}: none."""
        return {}

    # Interpretation

    def word_values(self, side: Side) -> str:
        """Return a description of the head's values for every word of the vocabulary; "": it has none. The head sows
        the values as "words" [B,U,vocabulary] for U positions."""
        return ""

    def vector_parts(self) -> dict[str, tuple[int, int]]:
        """Return {name: (begin, end)} of the parts of a vector; {}: a vector has no parts."""
        return {}

    # Losses besides the contrastive loss

    def loss_settings(self) -> dict[str, Any]:
        """Return the fields of `training.losses.LossSettings` that the family sets."""
        return {}

    def pseudo_query_length(self) -> int:
        """Return the number of tokens of a passage's pseudo-query; 0: the family reads no pseudo-queries."""
        return 0

    # Records

    def contract(self) -> dict[str, Any]:
        """Return {key: value} of the fields that vectors depend on."""
        names = [f.name for f in fields(self) if f.name not in (*NOT_KEYS, *self.NOT_IN_VECTORS, *self.FREE)]
        return {name: getattr(self, name) for name in names}

    def reference_options(self) -> tuple[str, ...]:
        """Return the settings that follow a published implementation instead of its paper, to be printed."""
        return ()
