"""Tasks: the functions and values by which one loop trains retrievers, rerankers and encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import Examples, TrainingSet
from jaxret.data.tokens.packing import Packer
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
        """Return a digest of the data and settings of a metric that may change on resuming; "" if none may change."""
        ...


@runtime_checkable
class TrainingPlan(Protocol[ReadExamplesT, MadeBatchT]):
    """How examples become batches: a pure function of the seeds and the number of the batch."""

    @property
    def batch_size(self) -> int:
        """Number of rows of a batch, without empty ones."""
        ...

    @property
    def padded_size(self) -> int:
        """Number of rows of a batch, empty rows included; a multiple of the number of devices."""
        ...

    @property
    def packer(self) -> Packer | None:
        """The packing of training batches; None: no packing."""
        ...

    def describe_batch(self, data: ReadExamplesT, batch_number: int) -> str:
        """Return the first queries of a batch for an error: "queries q1, q2"."""
        ...

    def training_batch(self, data: ReadExamplesT, batch_number: int, part: tuple[int, int] = (0, 1)) -> MadeBatchT:
        """Return the rows of a batch that belong to process `part[0]` of `part[1]`, on the host."""
        ...


@dataclass(frozen=True)
class Task(Generic[ModelT, ExamplesT, BatchT]):
    """A kind of model to train. The loop calls the functions in this order."""

    name: str  # value of `config.task`
    # model directory -> config keys and the values that the directory gives them
    encoder_settings: Callable[[Path], dict[str, Any]]
    build: Callable[[ConfigDict, EncoderConfig], ModelT]  # (config, shapes of the encoder) -> model
    # (config, model); raises ValueError for settings that the model or the task does not allow
    check: Callable[[ConfigDict, ModelT], None]
    # job -> tokenizer, contract and examples
    read_data: Callable[[TrainingJob[ModelT, ExamplesT, BatchT]], TrainingData[ExamplesT]]
    # (config, model, mesh, batch size / number of examples) -> objective
    make_objective: Callable[[ConfigDict, ModelT, Mesh, float], Objective[ModelT, BatchT]]
    # (job, data, objective) -> how examples become batches
    make_plan: Callable[
        [TrainingJob[ModelT, ExamplesT, BatchT], TrainingData[ExamplesT], Objective[ModelT, BatchT]],
        TrainingPlan[ExamplesT, BatchT],
    ]
    # (job, data, objective, parameters for their shapes) -> validator; None without a dev set
    make_validator: Callable[
        [TrainingJob[ModelT, ExamplesT, BatchT], TrainingData[ExamplesT], Objective[ModelT, BatchT], Params],
        Validator | None,
    ]


@dataclass(frozen=True)
class TrainingJob(Generic[ModelT, ExamplesT, BatchT]):
    """A run to begin or to resume, with a checked config that fits the encoder and the folder."""

    config: ConfigDict  # the config, with the values that the encoder's directory gives
    workdir: Workdir  # the run's folder
    mesh: Mesh  # the devices
    model: ModelT  # the model without parameters
    encoder: Path  # folder of the encoder's config and tokenizer; once the run has begun, its own copy
    has_begun: bool  # whether the folder contains the run already
    progress: bool  # whether progress is printed
    log: Log  # prints a line
    encoder_settings: dict[str, Any]  # config keys and the values that the encoder's directory gives them
    task: Task[ModelT, ExamplesT, BatchT]  # the kind of model
    changes: Changes = field(default_factory=dict)  # changes of the config since the run began

    @property
    def data_record(self) -> dict[str, Any]:
        """Contents of data.json; {} before it is written. Raises ContractError if the file is damaged."""
        if not self.workdir.data.exists():
            return {}
        record = read_json(self.workdir.data)
        if not isinstance(record, dict):
            raise ContractError(f"{self.workdir.data} is damaged: it has no record of the data; restore it")
        return record


# For functions that read only fields whose types do not depend on the task.
AnyJob = TrainingJob[Any, Any, Any]


@dataclass(frozen=True)
class TrainingData(Generic[ExamplesT]):
    """The data that a job reads."""

    tokenizer: TextTokenizer
    contract: dict[str, Any]  # contract of model and tokenizer
    train: ExamplesT | None  # training examples; None if the config names none
    dev: TrainingSet | None  # dev examples; None if the config names none
    corpus: DevCollection | None  # collection of validation.corpus; None unless this key names a file
    warnings: tuple[RunWarning, ...] = ()  # warnings of the task about its settings

    @property
    def record(self) -> dict[str, Any]:
        """Sizes and digests, for data.json."""
        return data_record(self.train, self.dev, self.corpus)


AnyData = TrainingData[Any]
