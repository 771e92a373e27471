"""The identity of a system: all settings and data on which results depend, except seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Keys of a config that change no result. Paths of data belong to them, because data.json has digests of the content.
NO_RESULT = (
    r"mesh\.(?!reduce_dtype).*|encode\.(?!dtype|dimension|words).*|encoder\.(attention|recompute|download|ignore)"
    r"|train\.(chunk_size|log_every|trackers|tracker_project|profile)|data\.(train|dev|store|dev_negatives_run)"
)

RUN_KEYS = ("train.start_from", "train.teacher")  # keys of a config that name another run, or a stage of its recipe
# Entries of data.json that are not data, but weights that a run began with or learned from.
WEIGHTS = ("start", "teacher")
VALIDATION = "validation"  # entry of data.json: digests of what validation reads besides the dev set


def without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat config that identify the system."""
    return {key: value for key, value in config.items() if not re.fullmatch(rf"seed\..*|{NO_RESULT}", key)}


def trained_on(record: Mapping[str, Any] | None, whole_sets: bool) -> dict[str, Any]:
    """Return digests of the data sets in a run's data.json, and of what its validation read.

    With `whole_sets`, a random part (data.subset) counts as the set that it was drawn from, because each seed draws
    another part.
    """
    sets = {name: entry for name, entry in (record or {}).items() if isinstance(entry, Mapping) and name not in WEIGHTS}
    if whole_sets:
        sets = {name: entry.get("subset_of") or entry for name, entry in sets.items()}
    return {
        name: dict(entry) if name == VALIDATION else [entry.get("sha256"), entry.get("scores")]
        for name, entry in sets.items()
    }
