"""Search for config changes that make a training step fit: changes are compiled until one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxret.parallel.chips import Topology

ConfigChange = dict[str, Any]


class TriedChange(NamedTuple):
    """A compiled change of the config."""

    change: ConfigChange
    total: int  # bytes that a device needs
    fits: bool


def memory_changes(config: ConfigDict, devices: int) -> Iterator[ConfigChange]:
    """Yield changes of a config that need less memory on `devices` devices. First come changes without effect on
    results, one by one and together, then bfloat16."""
    recompute: ConfigChange = {}
    if config.encoder.recompute == "none":
        yield {"encoder.recompute": "cheap"}
    if config.encoder.recompute != "layer":
        recompute = {"encoder.recompute": "layer"}
        yield recompute
    batch = config.train.batch_size
    chunk = max(devices, batch // 8)
    chunks: ConfigChange = {}
    if chunk < (config.train.chunk_size or batch):
        chunks = {"train.chunk_size": chunk}
        yield chunks
    split: ConfigChange = {}
    if devices > 1 and config.mesh.fsdp == 1:
        split = {"mesh.fsdp": next(n for n in (8, 4, 2, devices) if devices % n == 0)}
        yield split
    all_changes = recompute | chunks | split
    if len(all_changes) > 1:
        yield all_changes
    if config.encoder.dtype != "bfloat16":
        if all_changes:
            yield {"encoder.dtype": "bfloat16"}
        yield {"encoder.dtype": "bfloat16", **all_changes}


def with_changes(config: ConfigDict, change: ConfigChange) -> ConfigDict:
    """Return a copy of a config with changed keys."""
    copy = ConfigDict(config.to_dict())
    copy.update_from_flattened_dict(change)
    return copy


def advise(config: ConfigDict, topology: Topology, needs: Callable[[ConfigDict], int]) -> Iterator[TriedChange]:
    """Try changes until one fits, and yield each of them. Changes that the model or the mesh does not allow are
    skipped. `needs` returns the bytes of a device for a config."""
    for change in memory_changes(config, topology.devices):
        try:
            total = needs(with_changes(config, change))
        except ValueError:  # e.g. mesh.fsdp does not divide the hidden size
            continue
        fits = total <= topology.chip.memory
        yield TriedChange(change, total, fits)
        if fits:
            return
