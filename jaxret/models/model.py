"""The interface of models for training, checkpoints and runs: retrievers, cross-encoders, pre-training."""

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
    """The shapes and the computation of a model, without parameters. Parameters under a name that ends in "encoder"
    come from pre-trained files; other parameters are random, or come from `stored_head` or `initial_head`."""

    @property
    def module(self) -> Any:
        """The Linen module, whose `config` is the config of the encoder."""
        ...

    @property
    def compute(self) -> Compute:
        """How the model is computed, such as the type of products."""
        ...

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text."""
        ...

    @property
    def plain(self) -> Model:
        """Return this model with plain attention."""
        ...

    def with_gatherer(self, gatherer: ParameterGatherer) -> Model:
        """Return this model for use inside `jax.shard_map`: its layers gather their parameters with `gatherer`."""
        ...

    def with_compute(self, **changes: Any) -> Any:
        """Return this model with other values of some fields of `compute`."""
        ...

    def init(self, key: jax.Array) -> Params:
        """Return random parameters."""
        ...

    def __hash__(self) -> int: ...

    def contract(self) -> dict[str, Any]:
        """Return all settings that results depend on, besides the parameters."""
        ...

    def tokenizer_options(self) -> dict[str, Any]:
        """Return the fields of `TextTokenizer` that the model sets."""
        ...

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer that does not fit."""
        ...

    def stored_head(self, root: Path) -> Params:
        """Return the parameters of the head that are stored in a model's directory; {}: none, they start random."""
        ...

    def initial_head(self, weights: Params) -> Params:
        """Return the parameters of the head whose initial values are from the pre-trained encoder's `weights`; {}:
        none."""
        ...

    def reference_options(self) -> tuple[str, ...]:
        """Return the settings that follow a published implementation instead of its paper, to be printed."""
        ...

    def differences(self) -> tuple[str, ...]:
        """Return the computations that differ from the reference by default, to be printed."""
        ...


ModelT = TypeVar("ModelT", bound=Model)


@functools.lru_cache(maxsize=16)
def parameter_shapes(model: Model) -> Params:
    """Return the shapes and types of a model's parameters.

    The result is cached, because tracing `init` takes much of the time for which a run opens.
    """
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


@dataclass(frozen=True)
class LinenModel:
    """The base of models: a Linen module with the encoder's `config` and `compute`, without parameters."""

    module: Any

    @property
    def compute(self) -> Compute:
        return self.module.compute

    @property
    def longest(self) -> int:
        return self.module.config.longest

    @property
    def plain(self: T) -> T:
        """Return this model with plain attention, which XLA can analyse and split over devices by itself."""
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
