"""Make the first state of a run, from the weights of a pre-trained encoder or of another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.models.encoders.pretrained import find_model, load_pretrained, resolve_encoder, stores_mlm_head
from jaxret.models.encoders.weight_files import weights_digest
from jaxret.models.lora import ADAPTER
from jaxret.models.model import Model, parameter_shapes
from jaxret.models.partition import divide_parameters, join_parameters
from jaxret.models.peft_files import adapter_files, load_adapters, require_adapters_base
from jaxret.models.retriever_model import with_pretrained
from jaxret.parallel.mesh import shardings
from jaxret.runs.contract import of_whole_vectors, require_same_contract
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import choose_checkpoint, config_of_task, open_checkpoints, open_model
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, sha256_file
from jaxret.storage.checkpoint import tree_digest
from jaxret.training.task import AnyData, AnyJob
from jaxret.training.train_state import TrainState, make_update_rule, place_state, restore_state
from jaxret.types import Params

_HEAD = r"^(?!(\w+_)?encoder/)"  # matches paths of parameters outside encoders
_SAME_MODEL = "train.start_from must name a run with the same encoder, head, pooling and lengths."


def first_state(
    job: AnyJob, data: AnyData, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Return the first state of a run and the record of its weights for data.json: {"start": digest of the file, or
    step and digest of the checkpoint}. It is the first function of a training that reads weights.

    Raises:
        ContractError: the run to start from has another model, or this run began with other weights.
        ValueError: the weights do not fit the model.
    """
    config, source = job.config, job.config.train.start_from
    if config.train.round > 1:
        return continued_state(job, data, optimizer)
    if not source:
        directory = resolve_encoder(config.encoder.checkpoint, config.encoder.download)
        head = job.model.stored_head(find_model(config.encoder.checkpoint, config.encoder.download))
        start = {"weights": weights_digest(directory, config.encoder.sha256)}
        start |= {"head": tree_digest(head)} if head else {}
        start |= adapters_digest(config, start["weights"])
        require_same_weights(job, start, f"{directory}/model.safetensors")
        weights = load_encoder_weights(job, directory)
        return init_state(config, job.mesh, job.model, weights, optimizer, head), {"start": start}
    start_run = open_model(source, job.task.name, job.task.build)
    require_same_model(start_run.contract, data.contract, f"{source}/contract.json")
    start = {**start_run.checkpoint, **adapters_digest(config)}
    require_same_weights(job, start, f"the best checkpoint of {source}")
    adapters = first_adapters(config, job.mesh, job.model) if config.lora.rank else {}
    params, rule = join_parameters(jax.device_get(start_run.params), adapters), make_update_rule(config)
    state = place_state(job.mesh, params, optimizer, rule)
    return state, {"start": start}


def require_start(job: AnyJob, contract: Mapping[str, Any]) -> None:
    """Raise those errors of `first_state` that can be found without weights in memory. It is called before the data are
    tokenized, because that may take hours.

    Args:
        job: a job whose run has not begun.
        contract: the contract of its model and tokenizer.

    Raises:
        FileNotFoundError: train.start_from is not a run, or lora.adapters not a directory of adapters.
        CheckpointError: train.start_from has no checkpoint.
        ContractError: train.start_from has another model.
        ValueError: the encoder's weights do not have the digest encoder.sha256, or the adapters have another base.
    """
    config, source, digest = job.config, job.config.train.start_from, ""
    if config.encoder.sha256 or (config.lora.adapters and not source):
        directory = resolve_encoder(config.encoder.checkpoint, config.encoder.download)
        digest = weights_digest(directory, config.encoder.sha256)
    if source:
        folder = Workdir(source)
        with open_checkpoints(folder, config_of_task(folder, job.task.name)) as checkpoints:
            choose_checkpoint(checkpoints, "best" if config.train.round == 1 else "last", folder)
        require_same_model(read_json(folder.contract), contract, str(folder.contract))
    adapters_digest(config, "" if source else digest)


def adapters_digest(config: ConfigDict, base: str = "") -> dict[str, str]:
    """Return {"adapters": digest of the file in lora.adapters} for the record of a run's weights; {} without adapters.

    `base` is the digest of the encoder's weights; "" if the adapters change a run's checkpoint. Raises
    FileNotFoundError if the file is missing, and ValueError for adapters of another base.
    """
    if not config.lora.adapters:
        return {}
    require_adapters_base(config.lora.adapters, config.lora, config.train.start_from or config.encoder.checkpoint, base)
    return {"adapters": sha256_file(adapter_files(config.lora.adapters)[1])}


def first_step(job: AnyJob) -> int:
    """Return the number of steps of the earlier rounds, after which a run begins."""
    if job.config.train.round == 1:
        return 0
    if job.has_begun:
        return job.data_record["start"]["step"]
    folder = Workdir(job.config.train.start_from)
    with open_checkpoints(folder, config_of_task(folder, job.task.name)) as checkpoints:
        return choose_checkpoint(checkpoints, "last", folder)


def continued_state(
    job: AnyJob, data: AnyData, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Return the state (parameters, optimizer, moving average, step) of the last checkpoint of the previous round, and
    the record of its weights."""
    folder = Workdir(job.config.train.start_from)
    config = config_of_task(folder, job.task.name)
    require_same_model(read_json(folder.contract), data.contract, str(folder.contract))
    with open_checkpoints(folder, config) as checkpoints:
        step = choose_checkpoint(checkpoints, "last", folder)
        state = restore_state(checkpoints, step, job.mesh, job.model, optimizer, make_update_rule(job.config))
    start = {"step": step, "digest": tree_digest(state.weights)}
    require_same_weights(job, start, f"the last checkpoint of {folder}")
    return state, {"start": start}


def require_same_model(start_contract: Mapping[str, Any], run_contract: Mapping[str, Any], name: str) -> None:
    """Raise ContractError unless two contracts have the same parameters and tokens. The size of search vectors does not
    matter, because training uses vectors of full size.

    Args:
        start_contract: contract of the run to start from.
        run_contract: contract of the new run.
        name: path of `start_contract`, for the error.
    """
    require_same_contract(
        of_whole_vectors(start_contract), of_whole_vectors(run_contract), name, "this run", _SAME_MODEL
    )


def require_same_weights(job: AnyJob, start: Mapping[str, Any], name: str) -> None:
    """Raise ContractError if a run without a checkpoint began with other weights than `start`. The error calls the
    weights `name`."""
    stored_record = job.data_record.get("start") if job.has_begun else None
    if stored_record:
        remedy = "Restore the weights that the run began with, or choose another --workdir."
        require_equal({"start": stored_record}, {"start": start}, str(job.workdir.data), name, remedy)


def load_encoder_weights(job: AnyJob, directory: Path) -> Params:
    """Return the pre-trained weights in the shapes of the run's encoder. A missing MLM head is initialized at random,
    which is logged. Raises ValueError if this head would not be trained."""
    config, encoder = job.config, job.model.module.config
    if getattr(encoder, "mlm_head", False) and not stores_mlm_head(directory):
        if config.lora.rank:
            raise ValueError(
                f"{directory} has no MLM head, and with lora.rank {config.lora.rank} a new, random head would not be "
                "trained: choose an encoder with an MLM head, or set lora.rank=0"
            )
        job.log(f"{directory} has no MLM head: a new one is drawn, whose output matrix is the pre-trained word table")
    return load_pretrained(directory, config.encoder.ignore, encoder, config.seed.init)[1]


def init_state(
    config: ConfigDict,
    mesh: Mesh,
    model: Model,
    pretrained_params: Params,
    optimizer: optax.GradientTransformation,
    head: Params | None = None,
) -> TrainState:
    """Return the state of a new run. No device ever has a complete copy of parameters that are split.

    Args:
        config: config of the run; `seed.init` draws the parameters that are not pre-trained.
        mesh: the devices.
        model: the model of the run.
        pretrained_params: parameters of each encoder.
        optimizer: the optimizer whose state is made.
        head: stored parameters of heads; None: they are drawn, or begin as values of the encoder.
    """
    shapes, _ = divide_parameters(parameter_shapes(model), ADAPTER)
    heads = draw_parameters(config, mesh, model, _HEAD)
    params = with_pretrained(
        {**shapes, **heads}, pretrained_params, {**model.initial_head(pretrained_params), **(head or {})}
    )
    if config.lora.rank:
        params = join_parameters(params, first_adapters(config, mesh, model))
    return place_state(mesh, params, optimizer, make_update_rule(config))


def first_adapters(config: ConfigDict, mesh: Mesh, model: Model) -> Params:
    """Return the adapters that a run begins with: new ones, or the adapters of lora.adapters for each encoder."""
    adapters = draw_parameters(config, mesh, model, ADAPTER)
    if not config.lora.adapters:
        return adapters
    weights = load_adapters(config.lora.adapters, model.module.config, config.lora, config.encoder.ignore)
    return dict.fromkeys(adapters, weights)


def draw_parameters(config: ConfigDict, mesh: Mesh, model: Model, pattern: str) -> Params:
    """Return random parameters on the mesh.

    Args:
        config: config of the run; `seed.init` is the seed.
        mesh: the devices.
        model: the model of the run.
        pattern: regular expression of the paths of the parameters to draw.
    """

    def draw(key: jax.Array) -> Params:
        return divide_parameters(model.init(key), pattern)[1]

    key = jax.random.key(config.seed.init)
    return jax.jit(draw, out_shardings=shardings(mesh, jax.eval_shape(draw, key)))(key)
