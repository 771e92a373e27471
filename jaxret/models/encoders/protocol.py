"""What an encoder is to the rest of the project. One file an architecture says all of it; a new one is a new file and a
line in the table of `architectures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jaxtyping import Float

from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import Compute
from jaxret.types import HiddenStates, Tokens

# What a head, or the config, may ask of an encoder, by name. An encoder that cannot says why (`EncoderConfig.lacks`).
ABILITIES = (
    "fused_attention",  # scores are products alone, and all that a token may not see is padding
    "cls",  # the first token is [CLS], whose state stands for the text
    "leading",  # `leading` may take the place of the first token
    "mlm_head",  # a pre-trained head of masked language modelling may come along
    "positioned_masks",  # `embed` tells several [MASK]s apart, by their positions
)


@runtime_checkable
class EncoderConfig(Protocol):
    """Shapes and constants of an encoder: a frozen dataclass of plain values, read from config.json, that says
    everything about the computation but its parameters. What the config of a run may set: `num_layers` (fewer: the
    first ones) and, where there is such a field, `mlm_head` (bool; there unless `lacks` says otherwise) and
    `normalize_intermediate` (bool; where layers below the last come out raw)."""

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
    def longest(self) -> int:
        """Tokens that a text may have."""
        ...

    @property
    def lacks(self) -> Mapping[str, str]:
        """Those of ABILITIES that it does not have -> why, as the end of a sentence."""
        ...


class Encoder(Protocol):
    """A Linen module `Encoder(config, compute)`. Its layers are a `stack.Stack`, of products and dropout as in
    `layers.py`: there all that `compute` asks for is done. Every other parameter it may use as it finds it."""

    config: Any
    compute: Compute

    def __call__(
        self, tokens: Tokens, keep: Keep = Keep(), train: bool = False, leading: jax.Array | None = None
    ) -> HiddenStates:
        """Encodes a batch; state 0 is the output of the embeddings. The states of a text do not depend on whether it is
        packed (`layout.Layout`), but for rounding. `leading` [n] (ids) or [n,H] (word embeddings)
        replaces the first token by n slots, all at its position; the T of the states is then T - 1 + n. Raises
        ValueError for it where the encoder lacks "leading"."""
        ...

    def embed(self, tokens: Tokens, train: bool) -> Float[jax.Array, "B T H"]:
        """What the first layer reads, position and all."""
        ...

    @property
    def word_table(self) -> Float[jax.Array, "vocabulary H"]: ...

    # A module (hidden [*,H], word_table) -> logits [*,vocabulary]; there if config.mlm_head.
    mlm_head: Any
