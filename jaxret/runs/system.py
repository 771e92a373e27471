"""What runs of one system have in common: everything that results follow from, but seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Keys of a config that change no result; of where texts are, data.json says whether they are the same.
NO_RESULT = (
    r"mesh\.(?!reduce_dtype).*|encode\.(?!dtype).*|encoder\.(attention|recompute|download|ignore)"
    r"|train\.(chunk_size|log_every)|data\.(train|dev|store|dev_negatives_run)"
)


def without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys (flat) of a config that say which system it is."""
    return {key: value for key, value in config.items() if not re.fullmatch(rf"seed\..*|{NO_RESULT}", key)}


def trained_on(record: Mapping[str, Any] | None, whole: bool) -> dict[str, Any]:
    """Digests of what a run's data.json names. whole: of a random part (data.subset), those of the set that it is of,
    which another seed draws another part of."""
    sets = {name: one for name, one in (record or {}).items() if isinstance(one, Mapping) and name != "start"}
    if whole:
        sets = {name: one.get("subset_of") or one for name, one in sets.items()}
    return {name: [one.get("sha256"), one.get("scores")] for name, one in sets.items()}
