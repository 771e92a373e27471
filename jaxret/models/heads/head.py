"""What a head is to the rest of the project. One file a family says all of it; a new one is a new file, a line in the
table of `heads/__init__.py`, and its group of keys in configs/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import numpy as np

from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.keep import Keep
from jaxret.types import Embeddings, HiddenStates, Ragged, Tokens

Side = Literal["query", "passage"]
Params = dict[str, Any]
TOKENS = ("cls", "mean")
EACH = "each"  # in place of one of them: every token's state is a vector
NOT_KEYS = ("num_layers", "hidden_size", "vocab_size", "parent", "name")  # fields that are not from the config


@dataclass(frozen=True)
class Text:
    """What a head may need besides hidden states. tokens: padded, as the states are, however the encoder had them.
    labels [B,K]: token ids of each text's pseudo-query, -1 where there is none."""

    side: Side
    tokens: Tokens
    encoder: Any = None
    train: bool = False
    labels: jax.Array | None = None


def one_token(token: str, layers: Literal["all", "last"]) -> Keep:
    """The position that stands for the text."""
    return Keep(0, mean=True, layers=layers) if token == "mean" else Keep(1, layers=layers)


class Head(nn.Module):
    """HiddenStates -> Embeddings: what a text's vectors are.

    The fields of a family are the keys of its group in the config, `head.<name>.<field>`, and these four. What the
    methods below say holds for most families: a query has one vector, of the last layer at `token`; there is nothing
    but the contrastive loss. A family overrides what it does otherwise; there is no further inheritance.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    token: str = "cls"  # "cls": the first token stands for the text; "mean": the masked mean

    # Fields that change no vector, as what the loss adds; and of these those that change nothing once a run has begun:
    # memory, how a weight begins.
    NOT_IN_VECTORS: ClassVar[tuple[str, ...]] = ()
    FREE: ClassVar[tuple[str, ...]] = ()
    # Whether its vector is that of sentence-transformers' own modules: a directory of theirs then decides its keys.
    STOCK: ClassVar[bool] = False
    # Fields that a directory of another library decides, whose models are of this family.
    STATED: ClassVar[tuple[str, ...]] = ()
    # The linear layer, without a bias, that all its vectors went through last: the name of its parameters; "": none.
    PROJECTION: ClassVar[str] = ""
    # For runs of older versions: the config key that a field's value had, and what the code did while it had none.
    RENAMED: ClassVar[dict[str, str]] = {}
    ABSENT: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token not in TOKENS:
            raise ValueError(f"head.token is {self.token!r}; it must be one of {', '.join(TOKENS)}")
        self.check()

    # What must hold

    def check(self) -> None:
        """Raises ValueError for settings that mean nothing."""

    def needs(self) -> tuple[str, ...]:
        """What it asks of an encoder, of `encoders.protocol.ABILITIES`."""
        return ("cls",) if self.token == "cls" else ()

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raises ValueError for a tokenizer whose words do not fit."""
        if "cls" in self.needs() and tokenizer.cls_id is None:
            raise ValueError("head.token is 'cls', but the tokenizer has no [CLS]; set head.token='mean'")

    def pooling_problem(self, pooling: str) -> str:
        """Why its vectors cannot be pooled so; "" if they can."""
        vectors = self.vectors_per_passage()
        if vectors == 1:
            return "gives one vector"
        if vectors is None and pooling == "scalar_mix":
            return "has a vector for every token, so there is no fixed number of weights"
        return ""

    # Shapes

    def vectors_per_passage(self) -> int | None:
        """V, or None: one for every token."""
        return 1

    def dimension(self) -> int:
        """D, the size of one vector."""
        return self.hidden_size

    def late_interaction(self) -> bool:
        """Whether every token of a query is a vector, and a score is the sum of their maxima."""
        return False

    def vector_names(self) -> tuple[str, ...]:
        """What each of a passage's V vectors is; () where that says nothing (V = 1 or one for every token)."""
        return ()

    def layers_of(self, side: Side) -> tuple[int, ...]:
        """The layers whose states at a token are its vectors, in order; () if the vectors are anything else."""
        return ()

    def token_of(self, side: Side, pooling: str) -> str:
        """At which token those states are once they are pooled: one of TOKENS, or EACH; "": at none of these. Asked
        where there are `layers_of`."""
        return self.token

    # From text to vectors

    def text_options(self) -> dict[str, Any]:
        """What else than in every family a tokenizer does: fields of TextTokenizer."""
        return {}

    def seen(self, tokens: Tokens, side: Side) -> Tokens:
        """The tokens as the encoder gets them: which of them others may attend to."""
        return tokens

    def unseen(self) -> str:
        """Which tokens others do not attend to, for an error; "": all are seen."""
        return ""

    def kept(self, texts: Ragged, side: Side) -> np.ndarray:
        """Which of the tokens of texts are vectors, bool [R], where every one may be."""
        return np.ones(len(texts.flat), bool)

    def keep(self, side: Side) -> Keep:
        """What it needs of the encoder."""
        return one_token(self.token, "last")

    def leading(self, side: Side) -> jax.Array | None:
        """What replaces the first token: ids [n] or word embeddings [n,H]."""
        return None

    def slots(self, side: Side) -> int:
        """How many `leading` are: of the places that a text has in the encoder they take one less more."""
        return 1

    def __call__(self, hidden: HiddenStates, text: Text) -> Embeddings:
        return Embeddings(hidden.states[-1], hidden.mask)

    # What can be read of it

    def words(self, side: Side) -> str:
        """What the values are that it says of every word of the vocabulary, sown as "words" [B,U,vocabulary] for U
        places; "": it says nothing of words."""
        return ""

    def parts(self) -> dict[str, tuple[int, int]]:
        """Where in a vector the parts of it lie that mean something by themselves; {} if it has none."""
        return {}

    # What it learns from, beside the contrastive loss

    def loss(self) -> dict[str, Any]:
        """Settings of `training.losses.LossSettings` that the family brings along."""
        return {}

    def pseudo_query_length(self) -> int:
        """Tokens of a pseudo-query to learn from, for each passage; 0: none are read."""
        return 0

    # What is written down

    def contract(self) -> dict[str, Any]:
        """The keys that vectors depend on."""
        names = [f.name for f in fields(self) if f.name not in (*NOT_KEYS, *self.NOT_IN_VECTORS, *self.FREE)]
        return {name: getattr(self, name) for name in names}

    def reference_options(self) -> tuple[str, ...]:
        """What is set as a published implementation has it, where that is not as in the paper; to be printed."""
        return ()
