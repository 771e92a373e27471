"""What a model is to the loop, to checkpoints and to whoever opens a run: a retriever, or a reranker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from jaxret.data.tokenizer import TextTokenizer
from jaxret.distributed import Reader
from jaxret.models.encoders.layers import Compute

Params = dict[str, Any]
M = TypeVar("M", bound="LinenModel")


@runtime_checkable
class Model(Protocol):
    """Shapes and computation, without parameters. Those under a name that ends in "encoder" come from pre-trained
    files; all others are drawn, or what `stored_head` finds."""

    @property
    def module(self) -> Any:
        """A Linen module whose `config` is the encoder's."""
        ...

    @property
    def compute(self) -> Compute: ...

    @property
    def longest(self) -> int:
        """Tokens that a text may have."""
        ...

    @property
    def plain(self) -> Model:
        """The same with plain attention."""
        ...

    def reading(self, read: Reader) -> Model:
        """The same for the body of a `jax.shard_map`, whose layers read their parameters by `read`."""
        ...

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        ...

    def contract(self) -> dict[str, Any]:
        """Everything but the parameters that its results depend on."""
        ...

    def text_options(self) -> dict[str, Any]:
        """What its tokenizer does that others do not: fields of TextTokenizer."""
        ...

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raises ValueError for a tokenizer that it cannot do with."""
        ...

    def stored_head(self, root: Path) -> Params:
        """What a model's directory has for the parameters of its head; {}: nothing, they are drawn."""
        ...

    def reference_options(self) -> tuple[str, ...]:
        """What is set as a published implementation has it, where that is not as in the paper; to be printed."""
        ...

    def differences(self) -> tuple[str, ...]:
        """What is computed otherwise than the reference does, by default; to be printed."""
        ...


@dataclass(frozen=True)
class LinenModel:
    """What models have in common: a Linen module with `config`, the encoder's, and `compute`. Holds no parameters."""

    module: Any

    @property
    def compute(self) -> Compute:
        return self.module.compute

    @property
    def longest(self) -> int:
        """Tokens that a text may have."""
        return self.module.config.longest

    @property
    def plain(self: M) -> M:
        """The same with plain attention: XLA can split it over devices by itself, and its shapes and products are known
        everywhere."""
        return self.computed(attention="plain")

    def reading(self: M, read: Reader) -> M:
        """The same for the body of a `jax.shard_map`, whose layers read their parameters by `read`."""
        return self.computed(read=read)

    def computed(self: M, **changes: Any) -> M:
        """The same with changes of `compute`."""
        return replace(self, module=self.module.clone(compute=replace(self.compute, **changes)))

    def text_options(self) -> dict[str, Any]:
        return {}

    def reference_options(self) -> tuple[str, ...]:
        return ()

    def differences(self) -> tuple[str, ...]:
        return ()
