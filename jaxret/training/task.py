"""The seam between the loop and what it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.models.model import Model, Params
from jaxret.training.objective import Objective

if TYPE_CHECKING:  # a job holds its task
    from jaxret.training.begin import Job, Texts


@runtime_checkable
class Plan(Protocol):
    """How examples become batches: a pure function of the seeds and the number of the batch."""

    @property
    def batch_size(self) -> int: ...

    @property
    def places(self) -> int:
        """Rows of a batch with the empty ones: a multiple of the devices."""
        ...

    @property
    def packer(self) -> Any:
        """How its texts are packed; None: not at all."""
        ...

    def named(self, data: Any, number: int) -> str:
        """What a batch begins with, for an error: "queries q1, q2"."""
        ...

    def training_batch(self, data: Any, step: int, part: tuple[int, int] = (0, 1)) -> Any:
        """A process's part of a batch, on the host (see Objective)."""
        ...


Validate = Callable[[Params], dict[str, float]]


@dataclass(frozen=True)
class Task:
    """What the loop trains, in the order in which it asks.

    name: what `config.task` says. stated: what a model's directory says of the config. build: the model, from a config
    and the encoder's. check: raises ValueError for settings that the model, or this task, cannot have. read: tokenizer,
    contract and data. objective: of (config, model, mesh, epochs of a batch). plan: how its batches are made. validate:
    what measures parameters, or None without a dev set. Each is given the task's own model and objective.
    """

    name: str
    stated: Callable[[Path], dict[str, Any]]
    build: Callable[[ConfigDict, Any], Model]
    check: Callable[[ConfigDict, Any], None]
    read: Callable[[Job], Texts]
    objective: Callable[[ConfigDict, Any, Mesh, float], Objective]
    plan: Callable[[Job, Texts, Any], Plan]
    validate: Callable[[Job, Texts, Any, Params], Validate | None]
