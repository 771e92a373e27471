"""Open the folder of a run for the commands after training: config, tokenizer, contract, checkpoints.

The folder contains copies of the encoder's config and tokenizer, so resuming, encoding and search do not need the
encoder's original directory. Only a run with adapters reads weights from that directory (base_weights.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias

import jax
from flax import traverse_util
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.record_checks import shorten
from jaxret.data.tokens.prompts import read_prompts
from jaxret.data.tokens.tokenizer import AUTO_SEPARATOR, SEPARATOR, TOKENIZER_FILES, TextTokenizer
from jaxret.models.cross_encoder import make_cross_encoder_model
from jaxret.models.encoders.fused import require_kernel
from jaxret.models.encoders.pretrained import read_pooler
from jaxret.models.lora import BASE, cast_base, make_adapters, merge_adapters, with_adapters
from jaxret.models.model import Model, ModelT, parameter_shapes
from jaxret.models.partition import divide_parameters, join_parameters
from jaxret.models.retriever_model import RetrieverModel, encoder_config, make_retriever_model
from jaxret.parallel.mesh import make_mesh, map_with_names, place_tree, sharded_shapes
from jaxret.runs.added_keys import complete_config
from jaxret.runs.base_weights import encoder_of_base, read_base
from jaxret.runs.contract import DIMENSION, make_contract, of_whole_vectors, require_same_contract
from jaxret.runs.embedder import Embedder, Padding, Programs, padded_length
from jaxret.runs.encoded_steps import encoded_steps
from jaxret.runs.mismatch import ContractError
from jaxret.runs.seal import check_seal, write_sealed
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import atomic_write, read_json, write_json
from jaxret.storage.buckets.working_copy import refresh, shown_path
from jaxret.storage.checkpoint import CheckpointError, Checkpoints
from jaxret.storage.folder_kinds import RUN, require_folder_kind
from jaxret.storage.foreign_files import write_tensors
from jaxret.storage.unfinished import remove_leftovers
from jaxret.types import Params
from jaxret.version import __version__

LESS_IS_BETTER = ("nll", "average_rank")  # metrics of validation for which a lower value is better


def config_json(config: ConfigDict) -> dict[str, Any]:
    """Return a config in the form that JSON returns, with lists instead of tuples."""
    return json.loads(json.dumps(config.to_dict()))


def load_tokenizer(config: ConfigDict, directory: Path, model: Model) -> TextTokenizer:
    """Load the tokenizer in `directory` with the config's lengths and prompts. Raises ValueError if it does not fit the
    model."""
    tokens, prompts = config.tokens, read_prompts(config)
    tokenizer = TextTokenizer.load(
        directory,
        tokens.query_length,
        tokens.passage_length,
        query_prompt=prompts.query,
        passage_prompt=prompts.passage,
        task=prompts.task,
        skip_prompt=not prompts.in_mean and bool(prompts.query or prompts.passage),
        title_separator=SEPARATOR if tokens.title_separator == AUTO_SEPARATOR else tokens.title_separator,
        end_token=tokens.end_token,
        **model.tokenizer_options(),
    )
    try:
        model.check_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"{error} (tokenizer of {directory})") from error
    vocabulary_size, words = tokenizer.backend.get_vocab_size(), model.module.config.vocab_size
    if vocabulary_size > words:  # a lookup outside the table gives another word's row or NaN
        raise ValueError(
            f"the tokenizer of {directory} knows {vocabulary_size} words, but its encoder has {words} embeddings"
        )
    return tokenizer


def create_run(
    workdir: Workdir,
    config: ConfigDict,
    encoder: Path,
    contract: Mapping[str, Any],
    data: Any,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Create the folder of a run; config.json is written last.

    Args:
        workdir: the folder of the run.
        config: the config.
        encoder: directory with the encoder's config, tokenizer and pooler, which are copied.
        contract: the contract.
        data: record of the training data (JSON).
        settings: settings for the config that the encoder's directory declares, if any.

    Raises:
        ContractError: a file of the encoder is missing, or differs from the contract; then the folder does not become a
            run.
    """
    remove_leftovers(workdir.encoder)  # files of a start that was killed
    for name in ("config.json", *TOKENIZER_FILES):
        if (encoder / name).exists():
            with atomic_write(workdir.encoder / name, "wb") as file, open(encoder / name, "rb") as original:
                shutil.copyfileobj(original, file)
        else:
            (workdir.encoder / name).unlink(missing_ok=True)  # a file of a start that was killed
    digests = TextTokenizer.digests(workdir.encoder)
    if not (workdir.encoder / "config.json").exists() or digests != contract["tokenizer"]:
        raise ContractError(f"{encoder} was changed while the run began; start again, and do not change its files")
    if pooler := read_pooler(encoder):
        write_tensors(workdir.pooler, pooler)
    else:
        workdir.pooler.unlink(missing_ok=True)
    if settings:
        write_json(workdir.encoder_settings, settings)
    values = {workdir.contract: contract, workdir.data: data, workdir.config: config_json(config)}
    write_sealed(workdir, values)


def recorded_settings(workdir: Workdir) -> dict[str, Any]:
    """Return the settings for its config that the directory of a run's encoder declared; {} if it declared none.

    Raises ContractError if a file of the run is damaged or was edited.
    """
    if not workdir.encoder_settings.exists():
        return {}
    check_seal(workdir)
    return read_json(workdir.encoder_settings)


@dataclass(frozen=True)
class OpenedRun(Generic[ModelT]):
    """A run that was opened: its model, tokenizer, parameters and contract."""

    workdir: Workdir
    config: ConfigDict  # config with the lengths that are used now
    model: ModelT
    tokenizer: TextTokenizer
    params: Params = field(repr=False)
    contract: dict[str, Any]  # contract with the same lengths
    checkpoint: dict[str, Any]  # {"step", "digest"} of `params`
    mesh: Mesh
    program_cache: Programs = field(default_factory=dict, repr=False, compare=False)  # programs of the run's embedders
    padding: Padding = padded_length  # padded length of a text in the run's embedders

    def embedder(self: Run, unpooled: bool = False) -> Embedder:
        """Return an embedder with this run's parameters; all embedders of a run share their programs.

        With `unpooled`, the vectors of passages are not pooled.
        """
        retriever = self.model.unpooled() if unpooled else self.model
        embedder = make_embedder(retriever, self.params, self.mesh, self.tokenizer, self.config, self.program_cache)
        return replace(embedder, padding=self.padding)

    def with_dimension(self: Run, size: int, key: str = "dimension") -> Run:
        """Return the run with vectors that are cut to their first `size` dimensions; 0: all dimensions.

        Raises ValueError, with `key` in the message, for a dimension that the vectors cannot have.
        """
        model = self.model.with_dimension(size, key)
        cut = {DIMENSION: model.cut} if model.cut else {}
        return replace(self, model=model, contract=of_whole_vectors(self.contract) | cut)

    def has_contract(self, contract: Mapping[str, Any]) -> bool:
        """Return whether a contract of shards has the same meaning as this run's contract."""
        try:
            require_same_contract(contract, self.contract, "", "", "")
        except ContractError:
            return False
        return True

    def require_same_vectors(self, contract: Mapping[str, Any], name: str, remedy: str) -> None:
        """Raise ContractError with both values unless the contract in `name` matches this run's.

        Length limits may differ, and vectors may be cut.
        """
        model_name = f"the model in {self.workdir}"
        require_same_contract(contract, self.contract, name, model_name, remedy, lengths=False)


Run: TypeAlias = OpenedRun[RetrieverModel]


@dataclass(frozen=True)
class RunOverrides:
    """Settings of a run that may differ from its training; None: the same as in training."""

    query_length: int | None = None  # upper bound of a query's length in tokens
    passage_length: int | None = None  # upper bound of a passage's length in tokens
    tokens_per_batch: int | None = None  # approximate tokens of a batch
    attention: str | None = None  # implementation of attention


def make_embedder(
    retriever: RetrieverModel,
    params: Params,
    mesh: Mesh,
    tokenizer: TextTokenizer,
    config: ConfigDict,
    program_cache: Programs | None = None,
) -> Embedder:
    """Return the embedder of a run, during training or after it was opened.

    Args:
        retriever: the model.
        params: parameters of the model.
        mesh: the devices.
        tokenizer: tokenizer with the length limits.
        config: config of the run.
        program_cache: programs to share with other embedders.
    """
    return Embedder(
        retriever=retriever,
        params=params,
        mesh=mesh,
        pad_id=tokenizer.pad_id,
        max_lengths={"query": tokenizer.query_length, "passage": tokenizer.passage_length},
        tokens_per_batch=config.encode.tokens_per_batch,
        program_cache={} if program_cache is None else program_cache,
    )


def stored_config(workdir: Workdir) -> ConfigDict:
    """Return the config of a run, with the keys that later releases added.

    Raises FileNotFoundError if the folder is not a run, FileExistsError if it is of another kind, ContractError if
    one of its files is damaged or was edited.
    """
    if not workdir.config.exists():
        require_folder_kind(workdir.path, RUN)
        raise FileNotFoundError(
            f"{workdir} is not a run (it has no config.json); jaxret train or jaxret open makes one"
        )
    if not workdir.seal.exists() and not workdir.contract.exists():
        raise FileNotFoundError(
            f"{workdir} is not a run (it has config.json, as a model has, but no contract.json); "
            f"jaxret open {workdir} --workdir=RUN makes a run of a model"
        )
    check_seal(workdir)
    for path in (workdir.contract, workdir.encoder / "config.json"):  # the seal, which lists them, may be missing
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; restore it")
    config = read_json(workdir.config)
    if not isinstance(config, dict):
        raise ContractError(f"{workdir.config} is damaged: it holds no config; restore it")
    return ConfigDict(complete_config(config))


def open_run(workdir: str | os.PathLike[str], checkpoint: str = "best", **overrides: Any) -> Run:
    """Open a run of a retriever, with `checkpoint` "best", "last" or a step. `overrides` are fields of `RunOverrides`.

    Raises:
        FileNotFoundError: the folder is not a run.
        CheckpointError: the run has no such checkpoint.
        ContractError: files of the run were changed since training.
        ValueError: the encoder does not support a length, or the attention does not run here.
    """
    return open_model(workdir, "retrieval", make_retriever_model, checkpoint, RunOverrides(**overrides))


# Task -> name of its models, and the commands that use them.
USES = {
    "retrieval": "a retriever: encode and search use it",
    "reranking": "a reranker: rerank uses it",
    "pretraining": "the pre-training of an encoder, which is in its folder model: encoder.checkpoint takes it",
}


def config_of_task(workdir: Workdir, task: str) -> ConfigDict:
    """Return the config of a run of the given task. Raises the errors of `stored_config`, and ValueError for another
    task."""
    config = stored_config(workdir)
    if config.task != task:
        raise ValueError(f"{workdir} is {USES.get(config.task, config.task)}; {USES[task].partition(':')[0]} is needed")
    return config


def open_model(
    workdir: str | os.PathLike[str],
    task: str,
    build: Callable[[ConfigDict, Any], ModelT],
    checkpoint: str = "best",
    overrides: RunOverrides = RunOverrides(),
) -> OpenedRun[ModelT]:
    """Open the run of a task, as `open_run` does for retrieval.

    Args:
        workdir: the folder of the run.
        task: the task that the run must have.
        build: function that makes the model from a config and the encoder's config.
        checkpoint: "best", "last" or a step.
        overrides: settings that differ from training.

    Raises:
        ContractError: the config lacks a key that this version needs.
        ValueError: an override is not allowed.
    """
    folder = Workdir(workdir)
    config = config_of_task(folder, task)
    if overrides.attention is not None:
        config.encoder.attention = overrides.attention
    try:
        model = build(config, encoder_config(config, folder.encoder))
        tokenizer = load_tokenizer(config, folder.encoder, model)
    except AttributeError as error:
        if not isinstance(error.__context__, KeyError):  # ml_collections raises this chain for a missing key
            raise
        key = str(error).strip("\"'")
        raise ContractError(
            f"{folder}/config.json has no key {key!r}: another version of jaxret made the run; use that version"
        ) from error
    contract = make_contract(model, tokenizer, folder.encoder)
    require_stored_contract(folder, contract, "Restore the files.")
    tokenizer = with_lengths(config, model, tokenizer, overrides)
    if overrides.tokens_per_batch is not None:
        if overrides.tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch is {overrides.tokens_per_batch}; it must be at least 1")
        config.encode.tokens_per_batch = overrides.tokens_per_batch
    devices = jax.local_devices()
    require_kernel(config.encoder.attention, devices[0].platform)
    mesh = make_mesh(math.gcd(config.mesh.fsdp, len(devices)), devices)  # training may have had more devices
    with open_checkpoints(folder, config) as checkpoints:
        step = choose_checkpoint(checkpoints, checkpoint, folder)
        params = restore_trained(checkpoints, step, folder, config, model, mesh)
        record = {"step": step, "digest": checkpoints.params_digest(step)}
    contract = make_contract(model, tokenizer, folder.encoder)
    run = OpenedRun(folder, config, model, tokenizer, params, contract, record, mesh)
    return replace(run, params=merged_parameters(run)) if config.lora.rank else run


def trained_shapes(config: ConfigDict, model: Model) -> Params:
    """Return the shapes and types of the parameters in a run's checkpoints, which do not include the base of a run with
    adapters. `model` is without adapters."""
    shapes = parameter_shapes(with_adapters(model, config.lora))
    return divide_parameters(shapes, BASE)[0] if config.lora.rank else shapes


def record_shapes(workdir: Workdir, config: ConfigDict, model: Model) -> None:
    """Write `trained_shapes` to parameters.json, so that `open_run` does not trace the model."""
    arrays: dict[str, Any] = {}
    map_with_names(
        lambda name, leaf: arrays.update({name: {"dtype": leaf.dtype.name, "shape": list(leaf.shape)}}),
        trained_shapes(config, model),
    )
    record = {"jaxret": __version__, "parameters": arrays}
    if not workdir.parameters.exists() or read_json(workdir.parameters) != record:
        write_sealed(workdir, {workdir.parameters: record})


def stored_shapes(workdir: Workdir) -> Params | None:
    """Return the shapes and types in parameters.json. Return None if the file is missing, or if another version of
    jaxret wrote it, because its models may have other arrays. Raises ContractError if it is damaged."""
    if not workdir.parameters.exists():
        return None
    record = read_json(workdir.parameters)
    try:
        if record["jaxret"] != __version__:
            return None
        arrays = {
            name: jax.ShapeDtypeStruct(array["shape"], array["dtype"]) for name, array in record["parameters"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ContractError(
            f"{workdir.parameters} is damaged: it has no shapes of parameters; restore or delete it"
        ) from error
    return traverse_util.unflatten_dict(arrays, sep="/")


def restore_trained(
    checkpoints: Checkpoints, step: int, workdir: Workdir, config: ConfigDict, model: Model, mesh: Mesh
) -> Params:
    """Return the parameters of a checkpoint, which do not include the base of a run with adapters.

    Args:
        checkpoints: the checkpoints of the run.
        step: step of the checkpoint.
        workdir: folder of the run.
        config: config of the run.
        model: model without adapters.
        mesh: the devices.
    """
    shapes = stored_shapes(workdir) or trained_shapes(config, model)
    return checkpoints.restore(step, sharded_shapes(mesh, shapes))[0]


def merged_parameters(run: OpenedRun[Any]) -> Params:
    """Return the float32 parameters of a run with adapters: its trained `params` (adapters and head), with the adapters
    added to the base."""
    adapters = make_adapters(run.config.lora, run.model.module.config)
    assert adapters is not None  # the config has adapters
    params = merge_adapters(join_parameters(jax.device_get(run.params), base_encoders(run)), adapters.scaling)
    return place_tree(run.mesh, params)


def trained_parameters(run: OpenedRun[Any]) -> Params:
    """Return the adapters and the head in the checkpoint of an opened run with adapters, on the host."""
    with open_checkpoints(run.workdir, run.config) as checkpoints:
        step = run.checkpoint["step"]
        return jax.device_get(restore_trained(checkpoints, step, run.workdir, run.config, run.model, run.mesh))


def base_encoders(run: OpenedRun[Any]) -> Params:
    """Return the encoders of the base of an opened run with adapters, on the host, in the dtypes of its training."""
    return cast_base(base_of_run(run.workdir, run.config, run.model), run.config.lora.base_dtype)


def base_of_run(workdir: Workdir, config: ConfigDict, model: Model) -> Params:
    """Return the encoders with which a run with adapters began, on the host.

    Raises:
        FileNotFoundError: the base no longer exists.
        ContractError: the base was changed.
    """

    def open_other(folder: str, step: str) -> tuple[Params, dict[str, Any]]:
        build = make_retriever_model if config.task == "retrieval" else make_cross_encoder_model
        run = open_model(folder, config.task, build, step)
        return run.params, run.checkpoint

    return read_base(workdir, config, model, open_other)


def require_base(workdir: Workdir, config: ConfigDict) -> None:
    """Raise FileNotFoundError or ContractError unless the base of a run with adapters exists and is unchanged."""
    if not config.train.start_from:
        encoder_of_base(workdir, config)  # compares digests, without loading the weights
        return
    build = make_retriever_model if config.task == "retrieval" else make_cross_encoder_model
    base_of_run(workdir, config, build(config, encoder_config(config, workdir.encoder)))


def require_stored_contract(workdir: Workdir, contract: Mapping[str, Any], remedy: str) -> None:
    """Raise ContractError unless the run's contract.json contains `contract`."""
    stored_contract, name = read_json(workdir.contract), str(workdir.contract)
    require_same_contract(stored_contract, contract, name, f"the files in {workdir}", remedy)


def with_lengths(config: ConfigDict, model: Model, tokenizer: TextTokenizer, overrides: RunOverrides) -> TextTokenizer:
    """Return the tokenizer with the lengths of the overrides, and set these in the config.

    Args:
        config: config of the run, which is changed in place.
        model: the model, which limits the lengths.
        tokenizer: tokenizer with the lengths of training.
        overrides: settings that differ from training.

    Raises:
        ValueError: the model does not support a length.
    """
    for key in ("query_length", "passage_length"):
        length = getattr(overrides, key)
        if length is not None:
            if not 3 <= length <= model.longest:
                raise ValueError(f"{key} is {length}; it must be 3 to {model.longest}, the encoder's positions")
            config.tokens[key] = length
    lengths = {"query_length": config.tokens.query_length, "passage_length": config.tokens.passage_length}
    return replace(tokenizer, **lengths)


def open_checkpoints(workdir: Workdir, config: ConfigDict, writing: bool = False) -> Checkpoints:
    """Return the checkpoints of a run, ranked by its validation metric, or unranked (validation.best="last")."""
    metric = config.validation.metric if config.data.dev and config.validation.best == "metric" else None
    return Checkpoints(workdir.checkpoints, metric, LESS_IS_BETTER, writing, lambda: encoded_steps(workdir))


def choose_checkpoint(checkpoints: Checkpoints, name: str, workdir: Workdir) -> int:
    """Return the step of a checkpoint; `name` is "best", "last", or a step. Raises CheckpointError if none exists."""
    if name in ("best", "last"):
        step = checkpoints.best() if name == "best" else checkpoints.last()
        if step is None:
            raise CheckpointError(f"{workdir} has no checkpoint yet; jaxret train --workdir={workdir} continues it")
        return step
    if not name.isdecimal() or len(name) > 18:
        raise CheckpointError(f"checkpoint is {shorten(name)}; it must be best, last, or a step")
    return int(name)


def require_checkpoint(run: OpenedRun[Any], vectors: Path) -> None:
    """Raise CheckpointError if training has deleted the checkpoint of a run after it was opened. Vectors that are
    announced prevent this deletion, unless the training chose the checkpoint for it just before. `vectors` is the
    folder of the vectors."""
    folder = run.workdir.checkpoints / str(run.checkpoint["step"])
    refresh(folder)
    if not folder.exists():
        raise CheckpointError(
            f"{shown_path(folder)} was deleted: training has made a newer checkpoint, and no model fits vectors of the "
            f"deleted one. Delete {shown_path(vectors)}, if it exists, and run encode again"
        )


def find_best_checkpoint(workdir: Workdir, config: ConfigDict) -> dict[str, Any]:
    """Return `OpenedRun.checkpoint` (step and digest) of the best checkpoint without opening the run.

    Raises CheckpointError if the run has no checkpoint.
    """
    with open_checkpoints(workdir, config) as checkpoints:
        step = choose_checkpoint(checkpoints, "best", workdir)
        return {"step": step, "digest": checkpoints.params_digest(step)}
