"""The interface of encoders. An architecture is one file and one line in the table `ARCHITECTURES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jaxtyping import Float

from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.selection import Selection
from jaxret.types import HiddenStates, Tokens

# Abilities that a head or the config may need. `EncoderConfig.lacks` has the reason for each missing ability.
ABILITIES = (
    "fused_attention",  # scores have no bias, and only padding or distance masks keys
    "cls",  # the first token is [CLS], whose state represents the text
    "leading_tokens",  # the states of the first tokens depend on the text after them
    "prefix_tokens",  # `prefix` may replace the first token
    "mlm_head",  # the files may have a pre-trained head of masked language modelling
    "positioned_masks",  # the encoder has `embed`, whose embeddings of several [MASK]s differ by position
)


@runtime_checkable
class EncoderConfig(Protocol):
    """Shapes and constants of an encoder, read from config.json: a frozen dataclass of plain values.

    A run's config may set `num_layers` (to use only the first layers). It may also set the bool fields `mlm_head`,
    which exists unless the encoder lacks "mlm_head", and `normalize_intermediate`, which exists if states below the
    last layer have no norm.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def head_size(self) -> int:
        """The width of an attention head."""
        ...

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text."""
        ...

    @property
    def lacks(self) -> Mapping[str, str]:
        """Return {missing ability: reason, as the end of a sentence}."""
        ...


class Encoder(Protocol):
    """A Linen module `Encoder(config, compute)`. Its layers are a `stack.Stack`. They use the products and the dropout
    of `layers.py`, which implement `compute`."""

    config: Any
    compute: Compute

    def __call__(
        self, tokens: Tokens, selection: Selection = Selection(), train: bool = False, prefix: jax.Array | None = None
    ) -> HiddenStates:
        """Encode a batch. State 0 is the output of the embeddings. Packing changes states only by rounding.

        Args:
            train: whether to use dropout, which needs a "dropout" rng.
            prefix: n tokens that replace the first and all have its position: ids [n] or word embeddings [n,H]. The
              states then have T - 1 + n tokens.

        Raises:
            ValueError: `prefix` is set and the encoder lacks "prefix_tokens", or a text is longer than
              `config.longest`.
        """
        ...

    def embed(self, tokens: Tokens, train: bool) -> Float[jax.Array, "B T H"]:
        """Return the input of the first layer, position embeddings included. Encoders that lack "positioned_masks" do
        not have this method."""
        ...

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]:
        """The word embeddings, which the MLM head also reads."""
        ...

    # A module (hidden [*,H], word_table) -> logits [*,vocabulary]; exists if config.mlm_head.
    mlm_head: Any
