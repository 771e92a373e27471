"""Which config keys make another system, and which change no result."""

from __future__ import annotations

import pytest

from jaxret.configs import load_config
from jaxret.runs.identity import without_seeds
from jaxret.runs.mismatch import flatten

CHANGE_NO_RESULT = [
    "data.dev",
    "data.dev_negatives_run",
    "data.store",
    "data.train",
    "encode.shard_mb",
    "encode.shard_rows",
    "encode.tokens_per_batch",
    "encoder.attention",
    "encoder.download",
    "encoder.ignore",
    "encoder.recompute",
    "mesh.coordinator",
    "mesh.fsdp",
    "mesh.initialization_timeout",
    "mesh.num_processes",
    "mesh.platform",
    "mesh.process_id",
    "mesh.tensor",
    "train.chunk_size",
    "train.log_every",
    "train.profile",
    "train.tracker_project",
    "train.trackers",
]


def test_every_other_key_identifies_the_system() -> None:
    """A new key must be added here if it changes no result; otherwise, it identifies a system."""
    keys = flatten(load_config("base").to_dict())
    identity = without_seeds(keys)
    assert sorted(key for key in keys if key not in identity and not key.startswith("seed.")) == sorted(
        CHANGE_NO_RESULT
    )


@pytest.mark.parametrize("key", ["encode.words", "encode.dtype", "encode.dimension", "mesh.reduce_dtype"])
def test_what_changes_vectors_identifies_the_system(key: str) -> None:
    assert without_seeds({key: 1, "seed.data": 1, "encode.shard_mb": 1}) == {key: 1}
