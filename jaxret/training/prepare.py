"""Make a job from a config, check that settings, model, devices and folder fit together, and read its data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.tokens.batches import TrainingSet
from jaxret.models.encoders.fused import describe_attention, require_kernel
from jaxret.models.encoders.pretrained import find_model, resolve_encoder
from jaxret.models.lora import with_adapters
from jaxret.models.model import ModelT
from jaxret.models.retriever_model import encoder_config
from jaxret.parallel.mesh import make_mesh
from jaxret.parallel.processes import any_process, require_platform
from jaxret.parallel.progress import job_log
from jaxret.runs.contract import make_contract
from jaxret.runs.from_sentence_transformers import apply_settings
from jaxret.runs.identity import VALIDATION, WEIGHTS
from jaxret.runs.mismatch import require_equal
from jaxret.runs.resume import require_same_run
from jaxret.runs.run import load_tokenizer, recorded_settings, require_stored_contract
from jaxret.runs.trackers import check_trackers, tracker_names
from jaxret.runs.workdir import Workdir
from jaxret.training.config_check import check_config, reference_options
from jaxret.training.examples import data_record, load_examples, load_validation_corpus, require_sources
from jaxret.training.starting_weights import require_start
from jaxret.training.task import AnyJob, ExamplesT, Task, TrainingData, TrainingJob
from jaxret.training.unread_keys import describe_idle
from jaxret.types import BatchT


def prepare_job(
    config: ConfigDict,
    workdir: Workdir,
    progress: bool,
    explicit_keys: Iterable[str],
    task: Task[ModelT, ExamplesT, BatchT],
) -> TrainingJob[ModelT, ExamplesT, BatchT]:
    """Return the job of a config.

    Only JSON files of the encoder and of the run are read (no weights, tokenizer or data), so that a mistyped key is an
    error at once.

    Args:
        config: the config of the run.
        workdir: the run's folder, which need not exist.
        progress: whether progress is printed.
        explicit_keys: keys that the user set. A sentence-transformers directory does not change them, even if their
            values are the defaults.
        task: the task to train.

    Raises:
        ValueError: settings contradict each other, the model or the devices.
        ContractError: the folder has another run.
    """
    require_platform(config.mesh.platform, "mesh.platform")
    mesh = make_mesh(config.mesh.fsdp, tensor=config.mesh.tensor)
    check_config(config)
    check_trackers(tracker_names(config.train.trackers))
    has_begun = not any_process(not workdir.config.exists())
    name, download = config.encoder.checkpoint, config.encoder.download
    encoder = workdir.encoder if has_begun else resolve_encoder(name, download)
    settings = recorded_settings(workdir) if has_begun else task.encoder_settings(find_model(name, download))
    config, settings_changes = apply_settings(config, settings, name, explicit_keys)
    changes = require_same_run(workdir, config) if has_begun else {}
    model = with_adapters(task.build(config, encoder_config(config, encoder)), config.lora)
    task.check(config, model)
    require_kernel(config.encoder.attention, mesh.devices.flat[0].platform)
    log = job_log(progress)
    if settings_changes:
        log(f"from the sentence-transformers modules of {name}: {', '.join(settings_changes)}")
    log(describe_attention(config.encoder.attention))
    for option in reference_options(config, model):
        log(f"this follows a published implementation, not its paper: {option}")
    for difference in model.differences():
        log(f"this differs from the reference implementation: {difference}")
    for sentence in describe_idle(config):
        log(sentence)
    return TrainingJob(config, workdir, mesh, model, encoder, has_begun, progress, log, settings, task, changes)


def read_training_data(job: TrainingJob[ModelT, TrainingSet, BatchT]) -> TrainingData[TrainingSet]:
    """Return tokenizer, contract, and tokenized examples. Raises ContractError if the run began with other data, and
    DataError for bad records."""
    tokenizer = load_tokenizer(job.config, job.encoder, job.model)
    contract = make_contract(job.model, tokenizer, job.encoder)
    if job.has_begun:
        require_stored_contract(job.workdir, contract, "Restore the files, or choose another --workdir.")
    else:
        require_start(job, contract)
    require_sources(job.config)
    train, dev = (load_examples(job.config, name, tokenizer, job.progress, job.log) for name in ("train", "dev"))
    require_same_data(job, data_record(train, dev))
    corpus = load_validation_corpus(job.config, dev, tokenizer, job.progress, job.log)
    return TrainingData(tokenizer, contract, train, dev, corpus)


def require_same_data(job: AnyJob, record: dict[str, Any]) -> None:
    """Raise ContractError if the run began with other data than `record`, the contents of data.json. The
    files of validation may change, like its settings."""
    free = (*WEIGHTS, VALIDATION)
    if job.has_begun and (old_record := {key: value for key, value in job.data_record.items() if key not in free}):
        remedy = "A run can only be resumed on the data it began with."
        sources = " and ".join(dict.fromkeys(filter(None, (job.config.data[name] for name in ("train", "dev")))))
        require_equal(old_record, record, str(job.workdir.data), sources or "no data", remedy)


def log_changes(job: AnyJob, record: dict[str, Any]) -> None:
    """Log the keys that the config has changed since the run began, and the files of validation that have changed.

    `record` has the current contents of data.json. Older runs have no entry for validation, so their files are not
    compared.
    """
    for key, (old_value, new_value) in job.changes.items():
        job.log(f"{key} was {old_value!r} and is {new_value!r} from here on")
    earlier, current = job.data_record.get(VALIDATION, {}), record.get(VALIDATION, {})
    contents = {
        "corpus": f"the passages of validation.corpus, {job.config.validation.corpus}",
        "judgements": f"the judgements of data.dev, {job.config.data.dev}",
        "queries": f"the queries of data.dev, {job.config.data.dev}",
    }
    changed = [name for name in contents if name in earlier and name in current and earlier[name] != current[name]]
    for name in changed:
        job.log(f"{contents[name]}, have changed")
    if changed or any(key.startswith("validation.") for key in job.changes):
        job.log("validation has changed: its earlier and later values cannot be compared")
