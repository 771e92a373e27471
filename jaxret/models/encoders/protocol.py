"""Interface of encoders. An architecture is one file and a line in the table of `architectures.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jaxtyping import Float

from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.selection import Selection
from jaxret.types import HiddenStates, Tokens

# Abilities that a head or the config may need. An encoder without one gives the reason (`EncoderConfig.lacks`).
ABILITIES = (
    "fused_attention",  # scores are products alone; keys are masked by padding, or by their distance
    "cls",  # the first token is [CLS], whose state stands for the text
    "leading_tokens",  # the states of the first tokens have seen the text after them
    "prefix_tokens",  # `prefix` may replace the first token
    "mlm_head",  # there may be a pre-trained head of masked language modelling
    "positioned_masks",  # `embed` exists, and gives several [MASK]s different embeddings, by their positions
)


@runtime_checkable
class EncoderConfig(Protocol):
    """Shapes and constants of an encoder, read from config.json: a frozen dataclass of plain values.

    A run's config may set `num_layers` (the first ones) and, where there is such a field, `mlm_head` (bool; there
    unless lacking) and `normalize_intermediate` (bool; where states below the last layer have no norm).
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
        """Width of a head of attention."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that a text may have."""
        ...

    @property
    def lacks(self) -> Mapping[str, str]:
        """Return {missing ability: reason, as the end of a sentence}."""
        ...


class Encoder(Protocol):
    """A Linen module `Encoder(config, compute)`. Its layers are a `stack.Stack` and use the products and the dropout of
    `layers.py`, which implement `compute`."""

    config: Any
    compute: Compute

    def __call__(
        self, tokens: Tokens, selection: Selection = Selection(), train: bool = False, prefix: jax.Array | None = None
    ) -> HiddenStates:
        """Encode a batch; state 0 is the output of the embeddings. Packing changes states by rounding only.

        Args:
            train: whether there is dropout, which needs a "dropout" rng.
            prefix: n tokens in place of the first, all at its position: ids [n] or word embeddings [n,H]. The T of the
              states is then T - 1 + n.

        Raises:
            ValueError: prefix tokens, where the encoder lacks "prefix_tokens", or a batch longer than `config.longest`.
        """
        ...

    def embed(self, tokens: Tokens, train: bool) -> Float[jax.Array, "B T H"]:
        """Return the input of the first layer, position embeddings included; not there if "positioned_masks" is
        lacking."""
        ...

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]: ...

    # A module (hidden [*,H], word_table) -> logits [*,vocabulary]; exists if config.mlm_head.
    mlm_head: Any
