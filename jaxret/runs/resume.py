"""Going on with a run: what may have changed since it began, and how the folder remembers it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxret.contract import flatten, require_equal
from jaxret.models.heads import HEADS
from jaxret.runs.run import config_json, stored_config
from jaxret.runs.seal import write_sealed
from jaxret.runs.system import NO_RESULT
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json

Changes = dict[str, tuple[Any, Any]]  # key -> (before, now)

# What may change on resuming: no result depends on it, except for the schedule, and which checkpoint validation finds
# best. That is said then; what a longer run makes of each optimizer.decay is in docs/training.md.
SCHEDULE = ("train.steps", "train.epochs")
_FREE = rf"{NO_RESULT}|validation\..*|encode\.dtype|train\.(checkpoint_every|skip_nonfinite)"
_WEIGHTS = ("encoder.checkpoint", "encoder.sha256")  # read by nobody once there is a checkpoint
_ABSENT = "(absent)"


def require_same_run(workdir: Workdir, config: ConfigDict) -> Changes:
    """What the config given changes of the run in the folder, whose other settings are the same.

    Raises ContractError with both values of what must not change, or if a file of the run is damaged or was edited.
    """
    before, now = flatten(config_json(stored_config(workdir))), flatten(config_json(config))
    changes: Changes = {
        key: (before.get(key, _ABSENT), now.get(key, _ABSENT))
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT) and not _of_another_family(key, config.head.name)
    }
    saved = any(workdir.checkpoints.glob("[0-9]*"))
    refused = {
        key: both
        for key, both in changes.items()
        if not (_may_change(key, config.head.name) or (saved and key in _WEIGHTS))
    }
    require_equal(
        {key: old for key, (old, _) in refused.items() if old != _ABSENT},
        {key: new for key, (_, new) in refused.items() if new != _ABSENT},
        str(workdir.config),
        "the config given",
        "To resume the run use its config; to start another choose another --workdir.",
    )
    return changes


def _of_another_family(key: str, family: str) -> bool:
    """Whether nothing in this run reads the key."""
    group = re.match(r"head\.(\w+)\.", key)
    return bool(group) and group[1] in HEADS and group[1] != family  # type: ignore[index]


def _may_change(key: str, family: str) -> bool:
    own = (f"head.{family}.{name}" for name in getattr(HEADS.get(family), "FREE", ()))
    return key in (*SCHEDULE, *own) or bool(re.fullmatch(_FREE, key))


def remember(
    workdir: Workdir, config: ConfigDict, contract: Mapping[str, Any], data: Any, changes: Changes, step: int
) -> None:
    """Brings config.json, contract.json, data.json and the seal up to date; what changed is added to history.jsonl."""
    values = {workdir.contract: contract, workdir.data: data, workdir.config: config_json(config)}
    stale = not workdir.seal.exists() or any(not p.exists() or read_json(p) != value for p, value in values.items())
    if changes:
        line = {"step": step, "changes": {key: list(both) for key, both in changes.items()}}
        before = workdir.history.read_text(encoding="utf-8") if workdir.history.exists() else ""
        values = {workdir.history: before + json.dumps(line, sort_keys=True) + "\n", **values}
    if changes or stale:
        write_sealed(workdir, values)
