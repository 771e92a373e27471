"""Interface of heads. A family is one file, a line in the table of `heads/__init__.py`, and its group of keys in
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
EVERY_TOKEN = "each"  # instead of one of TOKENS: every token's state is a vector
NOT_KEYS = ("num_layers", "hidden_size", "vocab_size", "parent", "name")  # fields that are not from the config


@dataclass(frozen=True)
class HeadInput:
    """Input of a head besides hidden states."""

    side: Side
    tokens: Tokens  # padded, as the states are
    encoder: Any = None  # the module
    train: bool = False
    labels: jax.Array | None = None  # [B,K] token ids of each text's pseudo-query, -1: none


def one_token_selection(token: str, layers: Literal["all", "last"]) -> Selection:
    """Return the selection of the one position that represents the text."""
    if token == "cls":
        return Selection(1, layers=layers)
    over: dict[str, Literal["all", "later", "last"]] = {"mean": "all", "mean_without_first": "later", "last": "last"}
    return Selection(0, mean=True, over=over[token], layers=layers)


class VectorHead(nn.Module):
    """HiddenStates -> Embeddings: the vectors of texts.

    The fields of a family are the four below and the keys of its group in the config, `head.<name>.<field>`. The
    methods' defaults: a query has one vector, of the last layer at `token`; the contrastive loss is the only one. A
    family overrides methods; there is no further inheritance.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    # What represents the text: "cls": its first token; "mean": the masked mean; "last": its last token;
    # "mean_without_first": the mean over the tokens after the first.
    token: str = "cls"

    # Fields that change no vector, such as weights of losses; and fields that change no result of a run that has begun:
    # memory, initialization.
    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ()
    FREE: ClassVar[tuple[str, ...]] = ()
    TOKENS: ClassVar[tuple[str, ...]] = TOKENS  # values of `token` that mean something
    # Whether sentence-transformers' own modules compute its vector: a directory of theirs then sets its keys.
    STOCK: ClassVar[bool] = False
    # Fields that the directory of another library's model of this family sets.
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
        """Return the abilities that it needs of an encoder, of `encoders.protocol.ABILITIES`."""
        return ("cls",) if self.token == "cls" else ()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer that does not fit."""
        if "cls" in self.needs() and tokenizer.cls_id is None:
            raise ValueError("head.token is 'cls', but the tokenizer has no [CLS]; set head.token='mean' or 'last'")

    def pooling_problem(self, pooling: str) -> str:
        """Return the reason why its vectors cannot be pooled this way; "" if they can."""
        vectors = self.vectors_per_passage()
        if vectors == 1:
            return "gives one vector"
        if vectors is None and pooling == "scalar_mix":
            return "has a vector for every token, so there is no fixed number of weights"
        return ""

    def cut_problem(self) -> str:
        """Return the reason why the first numbers of its vectors are no smaller vector; "" if they are one."""
        return ""

    # Shapes

    def vectors_per_passage(self) -> int | None:
        """Return V; None: one vector for every token."""
        return 1

    def dimension(self) -> int:
        """Return D, the size of one vector."""
        return self.hidden_size

    def late_interaction(self) -> bool:
        """Return whether every token of a query is a vector, and a score is the sum of their maxima."""
        return False

    def projections(self) -> tuple[str, ...]:
        """Return the names of the linear layers, without biases, that all its vectors go through, in order."""
        return ()

    def sparse(self) -> bool:
        """Return whether a vector has a weight of at least 0 for every word of the vocabulary, nearly all of them 0, so
        that words and weights are stored."""
        return False

    def vector_names(self) -> tuple[str, ...]:
        """Return the name of each of a passage's V vectors; () for V = 1 or one for every token."""
        return ()

    def layers_of(self, side: Side) -> tuple[int, ...]:
        """Return the layers whose states at a token are its vectors, in order; () if vectors are anything else."""
        return ()

    def token_of(self, side: Side, pooling: str) -> str:
        """Return the token of those states after pooling: one of TOKENS, or EVERY_TOKEN; "": none of these. Only called
        where there are `layers_of`."""
        return self.token

    # From text to vectors

    def tokenizer_options(self) -> dict[str, Any]:
        """Return fields of TextTokenizer that the family sets."""
        return {}

    def attended(self, tokens: Tokens, side: Side) -> Tokens:
        """Return the tokens as the encoder gets them, with a mask of those that may be attended to."""
        return tokens

    def unattended(self) -> str:
        """Return a description of the tokens that no token attends to, for an error; "": there are none."""
        return ""

    def vector_mask(self, texts: Ragged, side: Side) -> np.ndarray:
        """Return which tokens of texts are vectors, bool [R], where every token may be one."""
        return np.ones(len(texts.flat), bool)

    def selection(self, side: Side) -> Selection:
        """Return the hidden states that it needs."""
        return one_token_selection(self.token, "last")

    def prefix_tokens(self, side: Side) -> jax.Array | None:
        """Return n tokens in place of the first: ids [n] or word embeddings [n,H]; None: no replacement."""
        return None

    def prefix_length(self, side: Side) -> int:
        """Return the number of prefix tokens. Texts are longer in the encoder by one less."""
        return 1

    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)

    def stored_parameters(self, root: Path) -> Params:
        """Return the parameters that another library's model in a directory has; {}: none."""
        return {}

    def initial_parameters(self, encoder: Any, weights: Params) -> Params:
        """Return the parameters that begin as values of the pre-trained encoder; {}: none.

        encoder: the module, for which `weights` are.
        """
        return {}

    # Interpretation

    def word_values(self, side: Side) -> str:
        """Return a description of the values for every word of the vocabulary, which it sows as "words"
        [B,U,vocabulary] for U positions; "": there are none."""
        return ""

    def vector_parts(self) -> dict[str, tuple[int, int]]:
        """Return {name: (begin, end)} of the parts of a vector with a meaning of their own; {}: there are none."""
        return {}

    # Losses besides the contrastive loss

    def loss_settings(self) -> dict[str, Any]:
        """Return fields of `training.losses.LossSettings` that the family sets."""
        return {}

    def pseudo_query_length(self) -> int:
        """Return the number of tokens of a passage's pseudo-query; 0: none are read."""
        return 0

    # Records

    def contract(self) -> dict[str, Any]:
        """Return the keys that vectors depend on."""
        names = [f.name for f in fields(self) if f.name not in (*NOT_KEYS, *self.NOT_IN_VECTORS, *self.FREE)]
        return {name: getattr(self, name) for name in names}

    def reference_options(self) -> tuple[str, ...]:
        """Return settings that follow a published implementation against its paper, to be printed."""
        return ()
