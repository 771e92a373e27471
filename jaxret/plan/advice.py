"""Which keys would make a training step fit: candidates are compiled until one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxret.chips import Topology

Change = dict[str, Any]


class Tried(NamedTuple):
    """A change of the config, and the bytes that a device then needs."""

    change: Change
    total: int
    fits: bool


def candidates(config: ConfigDict, topology: Topology) -> Iterator[Change]:
    """Changes that need less memory: first those that change no result, then all of these together, then bfloat16."""
    recompute: Change = {}
    if config.encoder.recompute == "none":
        yield {"encoder.recompute": "cheap"}
    if config.encoder.recompute != "layer":
        recompute = {"encoder.recompute": "layer"}
        yield recompute
    devices, batch = topology.devices, config.train.batch_size
    chunk = max(devices, batch // 8)
    chunks: Change = {}
    if chunk < (config.train.chunk_size or batch):
        chunks = {"train.chunk_size": chunk}
        yield chunks
    split: Change = {}
    if devices > 1 and config.mesh.fsdp == 1:
        split = {"mesh.fsdp": next(n for n in (8, 4, 2, devices) if devices % n == 0)}
        yield split
    together = recompute | chunks | split
    if len(together) > 1:
        yield together
    if config.encoder.dtype != "bfloat16":
        if together:
            yield {"encoder.dtype": "bfloat16"}
        yield {"encoder.dtype": "bfloat16", **together}


def changed(config: ConfigDict, change: Change) -> ConfigDict:
    """A copy of the config with some keys set."""
    copy = ConfigDict(config.to_dict())
    copy.update_from_flattened_dict(change)
    return copy


def advise(config: ConfigDict, topology: Topology, needs: Callable[[ConfigDict], int]) -> Iterator[Tried]:
    """Tries candidates until one fits. needs: config -> bytes of a device. A change that this model or mesh cannot have
    is passed over."""
    for change in candidates(config, topology):
        try:
            total = needs(changed(config, change))
        except ValueError:  # as a hidden size that mesh.fsdp does not divide
            continue
        fits = total <= topology.chip.memory
        yield Tried(change, total, fits)
        if fits:
            return
