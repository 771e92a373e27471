"""Resuming a run: settings that may change, and the record of such changes in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.encoders.pretrained import resolve_encoder
from jaxret.models.encoders.weight_files import weights_digest
from jaxret.models.heads import HEADS
from jaxret.runs.identity import NO_RESULT
from jaxret.runs.mismatch import flatten, require_equal
from jaxret.runs.run import config_json, stored_config
from jaxret.runs.seal import write_sealed
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json

Changes = dict[str, tuple[Any, Any]]  # key -> (before, now)

# Keys that may change on resuming. No result depends on them, except through the schedule and the choice of the best
# checkpoint, and these changes are logged. docs/training.md has the effect of a longer run on each optimizer.decay.
SCHEDULE = ("train.steps", "train.epochs")
_FREE = rf"{NO_RESULT}|validation\..*|encode\.(dtype|words)|train\.(checkpoint_every|skip_nonfinite)"
_ENCODER = ("encoder.checkpoint", "encoder.sha256")
_ABSENT = "(absent)"


def require_same_run(workdir: Workdir, config: ConfigDict) -> Changes:
    """Return the differences of a config from the stored config of the run. All of them are allowed on resuming.

    Raises ContractError with both values of every key that must not change, or if a file of the run is damaged or
    edited; ValueError if a new encoder.checkpoint does not have the weights of encoder.sha256.
    """
    old, new = flatten(config_json(stored_config(workdir))), flatten(config_json(config))
    changes: Changes = {
        key: (old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT) and not _of_another_family(key, config.head.name)
    }
    same_encoder = bool(changes.keys() & set(_ENCODER)) and _is_same_encoder(workdir, config)
    refusals = {
        key: values
        for key, values in changes.items()
        if not (_may_change(key, config.head.name) or (same_encoder and key in _ENCODER))
    }
    require_equal(
        {key: old for key, (old, _) in refusals.items() if old != _ABSENT},
        {key: new for key, (_, new) in refusals.items() if new != _ABSENT},
        str(workdir.config),
        "the config given",
        "To resume the run use its config; to start another choose another --workdir.",
    )
    return changes


def _is_same_encoder(workdir: Workdir, config: ConfigDict) -> bool:
    """Return whether encoder.checkpoint has the weights with which the run began, for example after it was moved.

    False for a run without checkpoints. Raises ValueError if the weights do not have the digest encoder.sha256.
    """
    if not any(workdir.checkpoints.glob("[0-9]*")):
        return False
    try:
        directory = resolve_encoder(config.encoder.checkpoint, config.encoder.download)
    except FileNotFoundError:
        return False
    return weights_digest(directory, config.encoder.sha256) == read_json(workdir.data).get("start", {}).get("weights")


def _of_another_family(key: str, family: str) -> bool:
    """Return whether the key belongs to another head, so that this run does not read it."""
    group = re.match(r"head\.(\w+)\.", key)
    return bool(group) and group[1] in HEADS and group[1] != family  # type: ignore[index]


def _may_change(key: str, family: str) -> bool:
    head_keys = (f"head.{family}.{name}" for name in getattr(HEADS.get(family), "FREE", ()))
    return key in (*SCHEDULE, *head_keys) or bool(re.fullmatch(_FREE, key))


def record_changes(
    workdir: Workdir, config: ConfigDict, contract: Mapping[str, Any], data: Any, changes: Changes, step: int
) -> None:
    """Update config.json, contract.json, data.json and the seal, and append the changes to history.jsonl.

    Args:
        workdir: folder of the run.
        config: new config.
        contract: new contract.
        data: new record of the data (JSON).
        changes: changes of the config, from `require_same_run`.
        step: step at which the run is resumed.
    """
    values = {workdir.contract: contract, workdir.data: data, workdir.config: config_json(config)}
    stale = not workdir.seal.exists() or any(not p.exists() or read_json(p) != value for p, value in values.items())
    if changes:
        line = {"step": step, "changes": {key: list(change) for key, change in changes.items()}}
        history = workdir.history.read_text(encoding="utf-8") if workdir.history.exists() else ""
        values = {workdir.history: history + json.dumps(line, sort_keys=True) + "\n", **values}
    if changes or stale:
        write_sealed(workdir, values)
