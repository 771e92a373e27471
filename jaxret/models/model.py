"""Interface of models for training, checkpoints and runs: retrievers, cross-encoders, pre-training."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.layers import Compute
from jaxret.parallel.mesh import ParameterGatherer
from jaxret.types import Params

T = TypeVar("T", bound="LinenModel")


@runtime_checkable
class Model(Protocol):
    """Shapes and computation, without parameters. Parameters under a name that ends in "encoder" come from pre-trained
    files, all others are random or come from `stored_head`."""

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
        """Return this model with plain attention."""
        ...

    def with_gatherer(self, gatherer: ParameterGatherer) -> Model:
        """Return this model for the body of a `jax.shard_map`, whose layers gather their parameters by `gatherer`."""
        ...

    def with_compute(self, **changes: Any) -> Any: ...

    def init(self, key: jax.Array) -> Params:
        """Return random parameters."""
        ...

    def __hash__(self) -> int: ...

    def contract(self) -> dict[str, Any]:
        """Return everything but the parameters that results depend on."""
        ...

    def tokenizer_options(self) -> dict[str, Any]:
        """Return fields of TextTokenizer that the model sets."""
        ...

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer that does not fit."""
        ...

    def stored_head(self, root: Path) -> Params:
        """Return the parameters of the head that a model's directory has; {}: none, they are random."""
        ...

    def initial_head(self, weights: Params) -> Params:
        """Return the parameters of the head that begin as values of the pre-trained encoder's `weights`; {}: none."""
        ...

    def reference_options(self) -> tuple[str, ...]:
        """Return settings that follow a published implementation against its paper, to be printed."""
        ...

    def differences(self) -> tuple[str, ...]:
        """Return computations that differ from the reference by default, to be printed."""
        ...


ModelT = TypeVar("ModelT", bound=Model)


@functools.lru_cache(maxsize=16)
def parameter_shapes(model: Model) -> Params:
    """Return the shapes and types of a model's parameters.

    Cached: tracing `init` takes a good part of the time in which a run opens, and JAX keeps what it traced.
    """
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


@dataclass(frozen=True)
class LinenModel:
    """Base of models: a Linen module with the encoder's `config` and `compute`, without parameters."""

    module: Any

    @property
    def compute(self) -> Compute:
        return self.module.compute

    @property
    def longest(self) -> int:
        return self.module.config.longest

    @property
    def plain(self: T) -> T:
        """Return this model with plain attention, which XLA can split over devices, and analyse, by itself."""
        return self.with_compute(attention="plain")

    def with_gatherer(self: T, gatherer: ParameterGatherer) -> T:
        return self.with_compute(gatherer=gatherer)

    def with_compute(self: T, **changes: Any) -> T:
        return replace(self, module=self.module.clone(compute=replace(self.compute, **changes)))

    def tokenizer_options(self) -> dict[str, Any]:
        return {}

    def initial_head(self, weights: Params) -> Params:
        return {}

    def reference_options(self) -> tuple[str, ...]:
        return ()

    def differences(self) -> tuple[str, ...]:
        return ()
