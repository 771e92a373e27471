"""Before the first step: a config and small files -> a run that is known to fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxret.contract import ContractError, require_equal
from jaxret.data.batches import AnyExamples, TrainingSet
from jaxret.data.tokenizer import TextTokenizer
from jaxret.distributed import any_process, make_mesh, require_platform
from jaxret.models.encoders.fused import require_kernel, told
from jaxret.models.encoders.pretrained import find, resolve
from jaxret.models.model import Model
from jaxret.models.retriever import encoder_config
from jaxret.runs.adopt import adopt
from jaxret.runs.contract import make_contract
from jaxret.runs.resume import Changes, require_same_run
from jaxret.runs.run import load_tokenizer, recorded_statement, require_stored_contract
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json
from jaxret.training.check import check, reference_options
from jaxret.training.examples import data_record, load_corpus, load_examples
from jaxret.training.task import Task
from jaxret.training.validation import Collection

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A run to begin or to go on with, whose config is sound and fits the encoder and the folder."""

    config: ConfigDict
    workdir: Workdir
    mesh: Mesh
    model: Model
    encoder: Path  # where the encoder's config and tokenizer are: the run's own copy, once it has begun
    begun: bool
    progress: bool
    say: Say
    stated: dict[str, Any]  # what the encoder's directory says of the config (runs/adopt.py)
    task: Task
    changes: Changes = field(default_factory=dict)

    @property
    def recorded(self) -> dict[str, Any]:
        """What data.json of a run that has begun says; {} in an old one that has none. Raises ContractError if that
        makes no sense."""
        if not self.workdir.data.exists():
            return {}
        found = read_json(self.workdir.data)
        if not isinstance(found, dict):
            raise ContractError(f"{self.workdir.data} is damaged: it holds no record of the data; restore it")
        return found


@dataclass(frozen=True)
class Texts:
    """What the job reads, and with what."""

    tokenizer: TextTokenizer
    contract: dict[str, Any]
    train: AnyExamples | None
    dev: TrainingSet | None
    corpus: Collection | None  # to validate with, if it is a file's

    @property
    def record(self) -> dict[str, Any]:
        """What data.json holds of them."""
        return data_record(self.train, self.dev)


def prepare(config: ConfigDict, workdir: Workdir, progress: bool, given: Iterable[str], task: Task) -> Job:
    """Config -> Job, from the JSON of the encoder and of the run alone: neither weights nor tokenizer nor data are
    read, so that what is mistyped is told at once. given: keys that are meant even where they are the base config's.
    Raises ValueError, and ContractError if the folder holds another run."""
    require_platform(config.mesh.platform, "mesh.platform")
    mesh = make_mesh(config.mesh.fsdp)
    check(config)
    begun = not any_process(not workdir.config.exists())
    name, download = config.encoder.checkpoint, config.encoder.download
    encoder = workdir.encoder if begun else resolve(name, download)
    asked = recorded_statement(workdir) if begun else task.stated(find(name, download))
    config, adopted = adopt(config, asked, name, given)
    changes = require_same_run(workdir, config) if begun else {}
    model = task.build(config, encoder_config(config, encoder))
    task.check(config, model)
    require_kernel(config.encoder.attention, mesh.devices.flat[0].platform)
    say = tqdm.write if progress and jax.process_index() == 0 else lambda _: None
    if adopted:
        say(f"as the sentence-transformers modules of {name} say: {', '.join(adopted)}")
    say(told(config.encoder.attention))
    for option in reference_options(config, model):
        say(f"as a published implementation does it, not its paper: {option}")
    for difference in model.differences():
        say(f"ours, not the reference's: {difference}")
    return Job(config, workdir, mesh, model, encoder, begun, progress, say, asked, task, changes)


def read_texts(job: Job) -> Texts:
    """Loads the tokenizer, reads and tokenises the data. Raises ContractError if a run that has begun read others, and
    DataError for bad records."""
    tokenizer = load_tokenizer(job.config, job.encoder, job.model)
    contract = make_contract(job.model, tokenizer, job.encoder)
    if job.begun:
        require_stored_contract(job.workdir, contract, tokenizer, "Restore the files, or choose another --workdir.")
    train, dev = (load_examples(job.config, name, tokenizer, job.progress, job.say) for name in ("train", "dev"))
    require_same_data(job, data_record(train, dev))
    corpus = load_corpus(job.config, dev, tokenizer, job.progress, job.say)
    return Texts(tokenizer, contract, train, dev, corpus)


def require_same_data(job: Job, found: dict[str, Any]) -> None:
    """Raises ContractError if a run that has begun read others. found: as in data.json."""
    if job.begun and (recorded := {key: value for key, value in job.recorded.items() if key != "start"}):
        remedy = "A run can only be resumed on the data it began with."
        if "subset_of" not in (recorded.get("train") or {}) and "train" in found:  # of an older jaxret
            found = found | {"train": {key: value for key, value in found["train"].items() if key != "subset_of"}}
        given = " and ".join(dict.fromkeys(filter(None, (job.config.data[name] for name in ("train", "dev")))))
        require_equal(recorded, found, str(job.workdir.data), given or "no data", remedy)


def tell_changes(job: Job) -> None:
    """Says what the config changes of the run."""
    for key, (before, now) in job.changes.items():
        job.say(f"{key} was {before!r} and is {now!r} from here on")
    if any(key.startswith("validation.") for key in job.changes):
        job.say("validation has changed: its values before and after are of measures that are not the same")
