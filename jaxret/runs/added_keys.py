"""Keys that a release adds to the files of a run, with defaults, so that runs of earlier releases can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import traverse_util

from jaxret.runs.mismatch import flatten

# File -> flattened key -> value with the behaviour before the key existed. Empty: 0.2.0 is the first release.
# After it, tests/runs/added_keys_test.py requires an entry for every new key.
ADDED_KEYS: dict[str, dict[str, Any]] = {"config.json": {}, "contract.json": {}}


def complete_config(stored_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored config with the keys that later releases added to configs."""
    return traverse_util.unflatten_dict(ADDED_KEYS["config.json"] | flatten(stored_config), sep=".")


def complete_contract(stored_contract: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored contract, flattened, with the keys of the current contract that later releases added."""
    keys = flatten(current)
    return {key: value for key, value in ADDED_KEYS["contract.json"].items() if key in keys} | flatten(stored_contract)
