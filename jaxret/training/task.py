"""Tasks: the values and functions by which the loop trains a retriever, a reranker or an encoder alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import Examples, TrainingSet
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import EncoderConfig
from jaxret.models.model import ModelT
from jaxret.runs.mismatch import ContractError
from jaxret.runs.resume import Changes
from jaxret.runs.run_warnings import RunWarning
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.training.examples import data_record
from jaxret.training.objective import Objective
from jaxret.training.validation import DevCollection
from jaxret.types import BatchT, Log, Params, TrainingBatch

ExamplesT = TypeVar("ExamplesT", bound=Examples)
ReadExamplesT = TypeVar("ReadExamplesT", bound=Examples, contravariant=True)
MadeBatchT = TypeVar("MadeBatchT", bound=TrainingBatch, covariant=True)


@runtime_checkable
class Validator(Protocol):
    """Measures parameters on the dev set."""

    def __call__(self, params: Params) -> dict[str, float]:
        """Return the metrics."""
        ...

    def measured_on(self, metric: str) -> str:
        """Return a digest of what a metric is measured on that may change on resuming; "" if nothing may."""
        ...


@runtime_checkable
class TrainingPlan(Protocol[ReadExamplesT, MadeBatchT]):
    """How examples become batches: a pure function of the seeds and the number of the batch."""

    @property
    def batch_size(self) -> int: ...

    @property
    def padded_size(self) -> int:
        """Rows of a batch with the empty ones: a multiple of the devices."""
        ...

    @property
    def packer(self) -> Any:
        """How texts of training batches are packed; None: not at all."""
        ...

    def describe_batch(self, data: ReadExamplesT, number: int) -> str:
        """Return the beginning of a batch, for an error: "queries q1, q2"."""
        ...

    def training_batch(self, data: ReadExamplesT, step: int, part: tuple[int, int] = (0, 1)) -> MadeBatchT:
        """Return the rows of a batch that belong to process `part[0]` of `part[1]`, on the host."""
        ...


@dataclass(frozen=True)
class Task(Generic[ModelT, ExamplesT, BatchT]):
    """A kind of model to train. The loop calls the functions in this order."""

    name: str  # as in `config.task`
    # model directory -> keys of the config that the directory decides
    encoder_settings: Callable[[Path], dict[str, Any]]
    build: Callable[[ConfigDict, EncoderConfig], ModelT]  # (config, shapes of the encoder) -> model
    # raises ValueError for settings that this model, or this task, cannot have
    check: Callable[[ConfigDict, ModelT], None]
    # job -> tokenizer, contract and examples
    read_data: Callable[[TrainingJob[ModelT, ExamplesT, BatchT]], TrainingData[ExamplesT]]
    # (config, model, mesh, epochs of a batch) -> loss of a batch
    make_objective: Callable[[ConfigDict, ModelT, Mesh, float], Objective[ModelT, BatchT]]
    # how its batches are made
    make_plan: Callable[
        [TrainingJob[ModelT, ExamplesT, BatchT], TrainingData[ExamplesT], Objective[ModelT, BatchT]],
        TrainingPlan[ExamplesT, BatchT],
    ]
    # (job, data, objective, parameters to take shapes from) -> metrics; None without a dev set
    make_validator: Callable[
        [TrainingJob[ModelT, ExamplesT, BatchT], TrainingData[ExamplesT], Objective[ModelT, BatchT], Params],
        Validator | None,
    ]


@dataclass(frozen=True)
class TrainingJob(Generic[ModelT, ExamplesT, BatchT]):
    """A run to begin or to resume, whose config is sound and fits the encoder and the folder."""

    config: ConfigDict  # with the keys that the encoder's directory decides
    workdir: Workdir  # the run's folder
    mesh: Mesh
    model: ModelT  # built, without parameters
    encoder: Path  # folder of the encoder's config and tokenizer: the run's own copy, once it has begun
    has_begun: bool  # whether the folder holds the run already
    progress: bool
    log: Log
    encoder_settings: dict[str, Any]  # keys of the config that the encoder's directory decides
    task: Task[ModelT, ExamplesT, BatchT]  # the kind of model
    changes: Changes = field(default_factory=dict)  # of the config, since the run began

    @property
    def data_record(self) -> dict[str, Any]:
        """Contents of data.json, {} where there is none yet. Raises ContractError if the file is damaged."""
        if not self.workdir.data.exists():
            return {}
        record = read_json(self.workdir.data)
        if not isinstance(record, dict):
            raise ContractError(f"{self.workdir.data} is damaged: it holds no record of the data; restore it")
        return record


AnyJob = TrainingJob[Any, Any, Any]


@dataclass(frozen=True)
class TrainingData(Generic[ExamplesT]):
    """Everything that a job reads."""

    tokenizer: TextTokenizer
    contract: dict[str, Any]  # of model and tokenizer
    train: ExamplesT | None  # examples to train on; None if the config names none
    dev: TrainingSet | None  # examples to validate with; None if the config names none
    corpus: DevCollection | None  # collection to validate with, if it is a file's
    warnings: tuple[RunWarning, ...] = ()  # of the task, beside those of the examples

    @property
    def record(self) -> dict[str, Any]:
        """Sizes and digests, for data.json."""
        return data_record(self.train, self.dev, self.corpus)


AnyData = TrainingData[Any]
