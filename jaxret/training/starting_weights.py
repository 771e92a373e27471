"""The weights that a new run begins with: those of a pre-trained encoder, or of another run."""

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
from jaxret.models.retriever import with_pretrained
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

HEAD = r"^(?!(\w+_)?encoder/)"  # matches paths of parameters outside encoders
_SAME_MODEL = "train.start_from must name a run with the same encoder, head, pooling and lengths."


def first_state(
    job: AnyJob, data: AnyData, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Return a new run's state and the record of its weights: {"start": digest of the file, or step and digest of the
    checkpoint}, for data.json. Weights are read here, and nowhere before.

    Raises:
        ContractError: the run to start from is another model; or, in a run that has begun, the weights are not those
            that it began with.
        ValueError: the weights do not fit.
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
    other = open_model(source, job.task.name, job.task.build)
    require_same_model(other.contract, data.contract, f"{source}/contract.json")
    start = {**other.checkpoint, **adapters_digest(config)}
    require_same_weights(job, start, f"the best checkpoint of {source}")
    adapters = first_adapters(config, job.mesh, job.model) if config.lora.rank else {}
    params, rule = join_parameters(jax.device_get(other.params), adapters), make_update_rule(config)
    state = place_state(job.mesh, params, optimizer, rule)
    return state, {"start": start}


def require_start(job: AnyJob, contract: Mapping[str, Any]) -> None:
    """Raise the errors of `first_state` that need no weights in memory: tokenizing the data may take hours before it.

    Args:
        job: whose run has not begun.
        contract: of its model and tokenizer.

    Raises:
        FileNotFoundError: train.start_from is no run, or lora.adapters no directory of adapters.
        CheckpointError: train.start_from has no checkpoint.
        ContractError: train.start_from is another model.
        ValueError: the encoder's weights are not those of encoder.sha256, or the adapters have another base.
    """
    config, source = job.config, job.config.train.start_from
    if source:
        folder = Workdir(source)
        with open_checkpoints(folder, config_of_task(folder, job.task.name)) as checkpoints:
            choose_checkpoint(checkpoints, "best" if config.train.round == 1 else "last", folder)
        require_same_model(read_json(folder.contract), contract, str(folder.contract))
        adapters_digest(config)
    elif config.encoder.sha256 or config.lora.adapters:
        directory = resolve_encoder(config.encoder.checkpoint, config.encoder.download)
        adapters_digest(config, weights_digest(directory, config.encoder.sha256))


def adapters_digest(config: ConfigDict, base: str = "") -> dict[str, str]:
    """Return {"adapters": digest of the file in lora.adapters}, for the record of a run's weights; {} without them.

    base: digest of the encoder's weights; "": the adapters are of a run's checkpoint.

    Raises FileNotFoundError, and ValueError for adapters of another base.
    """
    if not config.lora.adapters:
        return {}
    require_adapters_base(config.lora.adapters, config.lora, config.train.start_from or config.encoder.checkpoint, base)
    return {"adapters": sha256_file(adapter_files(config.lora.adapters)[1])}


def first_step(job: AnyJob) -> int:
    """Return the number of steps before the first one of a run: those of the rounds before it."""
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
    """Return the state of the last checkpoint of the round before, and its record, as `first_state` does: parameters,
    optimizer, moving average and step."""
    folder = Workdir(job.config.train.start_from)
    config = config_of_task(folder, job.task.name)
    require_same_model(read_json(folder.contract), data.contract, str(folder.contract))
    with open_checkpoints(folder, config) as checkpoints:
        step = choose_checkpoint(checkpoints, "last", folder)
        state = restore_state(checkpoints, step, job.mesh, job.model, optimizer, make_update_rule(job.config))
    start = {"step": step, "digest": tree_digest(state.weights)}
    require_same_weights(job, start, f"the last checkpoint of {folder}")
    return state, {"start": start}


def require_same_model(theirs: Mapping[str, Any], ours: Mapping[str, Any], name: str) -> None:
    """Raise ContractError unless two contracts have the same parameters and tokens: training uses whole vectors.

    Args:
        theirs: contract of the run to start from.
        ours: that of the run that starts.
        name: of their contract, for the error.
    """
    require_same_contract(of_whole_vectors(theirs), of_whole_vectors(ours), name, "this run", _SAME_MODEL)


def require_same_weights(job: AnyJob, start: Mapping[str, Any], name: str) -> None:
    """Raise ContractError unless a run that has begun, but has no checkpoint yet, began with the weights `start`, which
    come from `name`."""
    stored_record = job.data_record.get("start") if job.has_begun else None
    if stored_record:
        remedy = "Restore the weights that the run began with, or choose another --workdir."
        require_equal({"start": stored_record}, {"start": start}, str(job.workdir.data), name, remedy)


def load_encoder_weights(job: AnyJob, directory: Path) -> Params:
    """Return the pre-trained weights, in the shapes of the run's encoder; log if an MLM head has to be drawn. Raises
    ValueError if that would not be trained."""
    config, encoder = job.config, job.model.module.config
    if getattr(encoder, "mlm_head", False) and not stores_mlm_head(directory):
        if config.lora.rank:
            raise ValueError(
                f"{directory} has no MLM head, and with lora.rank {config.lora.rank} a new one would stay as it is "
                "drawn: choose an encoder that has one, or set lora.rank=0"
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
    """Return a new run's state. No device ever holds an unsharded copy.

    Args:
        config: of the run; `seed.init` draws the parameters that are not pre-trained.
        model: whose parameters these are.
        pretrained_params: parameters of each encoder.
        optimizer: whose state is made.
        head: stored parameters of heads; None: they are drawn, or begin as values of the encoder.
    """
    shapes, _ = divide_parameters(parameter_shapes(model), ADAPTER)
    heads = draw_parameters(config, mesh, model, HEAD)
    params = with_pretrained(
        {**shapes, **heads}, pretrained_params, {**model.initial_head(pretrained_params), **(head or {})}
    )
    if config.lora.rank:
        params = join_parameters(params, first_adapters(config, mesh, model))
    return place_state(mesh, params, optimizer, make_update_rule(config))


def first_adapters(config: ConfigDict, mesh: Mesh, model: Model) -> Params:
    """Return the adapters that a run begins with: new ones, or those of lora.adapters for each encoder.

    Args:
        model: with adapters.
    """
    adapters = draw_parameters(config, mesh, model, ADAPTER)
    if not config.lora.adapters:
        return adapters
    weights = load_adapters(config.lora.adapters, model.module.config, config.lora, config.encoder.ignore)
    return dict.fromkeys(adapters, weights)


def draw_parameters(config: ConfigDict, mesh: Mesh, model: Model, pattern: str) -> Params:
    """Return random parameters, on the mesh, whose paths match a pattern.

    Args:
        config: of the run; `seed.init` draws them.
        model: whose parameters these are.
        pattern: of their paths.
    """

    def draw(key: jax.Array) -> Params:
        return divide_parameters(model.init(key), pattern)[1]

    key = jax.random.key(config.seed.init)
    return jax.jit(draw, out_shardings=shardings(mesh, jax.eval_shape(draw, key)))(key)
