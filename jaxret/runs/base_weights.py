"""The base of a run with adapters: the encoder with which it began, which is not in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxret.models.encoders.pretrained import load_pretrained, resolve_encoder
from jaxret.models.encoders.weight_files import weights_digest
from jaxret.models.model import Model, parameter_shapes
from jaxret.runs.mismatch import require_equal
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.types import Params

_REMEDY = "The run's adapters fit only that base: restore it."


def read_base(
    workdir: Workdir, config: ConfigDict, model: Model, open_other: Callable[[str, str], tuple[Params, dict[str, Any]]]
) -> Params:
    """Return the encoders of a run's base, on the host: of encoder.checkpoint, or of the run train.start_from.

    Args:
        model: model of the run, whose encoders are read.
        open_other: (folder of a run, a checkpoint's step) -> its parameters, and step and digest of the checkpoint.

    Raises:
        FileNotFoundError: the base is not where it was.
        ContractError: the base is not the one that the run began with.
    """
    names = [name for name in parameter_shapes(model) if name.endswith("encoder")]
    if config.train.start_from:
        record = {key: value for key, value in read_json(workdir.data)["start"].items() if key != "adapters"}
        params, checkpoint = open_other(config.train.start_from, str(record["step"]))
        name = f"checkpoint {record['step']} of {config.train.start_from}"
        require_same_base(workdir, record, checkpoint, name)
        return {name: jax.device_get(params[name]) for name in names}
    directory = encoder_of_base(workdir, config)
    _, weights = load_pretrained(directory, config.encoder.ignore, model.module.config, config.seed.init)
    return dict.fromkeys(names, weights)


def encoder_of_base(workdir: Workdir, config: ConfigDict) -> Path:
    """Return the directory of encoder.checkpoint, after checking that its weights are the base of a run with adapters.

    Raises FileNotFoundError if the base was moved, and ContractError if it is another one.
    """
    try:
        directory = resolve_encoder(config.encoder.checkpoint, config.encoder.download)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{workdir} holds adapters of an encoder that cannot be read: {error}. If it was moved, run the run's "
            "jaxret train again with the new encoder.checkpoint"
        ) from error
    digest = {"weights": weights_digest(directory, config.encoder.sha256)}
    record = {"weights": read_json(workdir.data)["start"].get("weights")}
    require_same_base(workdir, record, digest, f"{directory}/model.safetensors")
    return directory


def require_same_base(workdir: Workdir, record: Mapping[str, Any], present: Mapping[str, Any], name: str) -> None:
    """Raise ContractError unless a base is the one that a run began with.

    Args:
        record: digest of the base that the run began with.
        present: digest of the base that exists now.
        name: name of the base, for the error.
    """
    require_equal({"base": record}, {"base": present}, str(workdir.data), name, _REMEDY)
