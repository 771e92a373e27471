"""Processes, the mesh, and where every parameter lies (by its path; the first matching pattern wins)."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.checkpoint import path_name

Tree = Any

# Scanned layers have a leading layer axis. Kernels are split over "fsdp" by input features, tables by hidden size;
# everything small is replicated. Optimiser state carries the parameter's path in its own, so it follows.
PARAMETER_RULES: tuple[tuple[str, P], ...] = (
    (r"layers/.*kernel$", P(None, "fsdp", None)),
    (r"\b(word|position|type)/embedding$", P(None, "fsdp")),
    (r"", P()),
)


def initialize(
    coordinator: str = "", num_processes: int = 1, process_id: int = 0, timeout: int = 300, where: str = "--"
) -> None:
    """Joins a multi-process job. On one process with no coordinator nothing happens.

    coordinator: "host:port" of process 0, or "auto" where the platform knows (TPU pods, Slurm). timeout: seconds that
    the processes wait for each other. where: what the names of the settings begin with, for errors. Raises ValueError
    if the settings do not fit together, TimeoutError if nobody is at `coordinator`.
    """
    given = f"{where}num_processes={num_processes} and {where}process_id={process_id}"
    if coordinator in ("", "auto"):
        if (num_processes, process_id) != (1, 0):
            raise ValueError(f"{given} need {where}coordinator=HOST:PORT; one process alone, and 'auto', needs neither")
        if not coordinator:
            return
    else:
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{where}coordinator={coordinator} must be HOST:PORT of process 0, or 'auto'")
        if num_processes < 2 or not 0 <= process_id < num_processes:
            raise ValueError(
                f"{where}coordinator={coordinator} with {given}: every process must be told how many there are (2 or "
                "more) and which of them it is (from 0)"
            )
    if timeout < 1:
        raise ValueError(f"{where}initialization_timeout={timeout} must be at least 1 second")
    if coordinator == "auto":
        jax.distributed.initialize(initialization_timeout=timeout)
        return
    if process_id:
        _wait_for(coordinator, timeout)
    # When not all come, XLA ends the process with a dump of its own: the reason goes before.
    line = f"error: not all of the {num_processes} processes came to {coordinator} within {timeout} s"
    warning = threading.Timer(max(timeout - 1, 0.5), print, (line,), {"file": sys.stderr, "flush": True})
    warning.daemon = True
    warning.start()
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=timeout)
    finally:
        warning.cancel()


def _wait_for(address: str, timeout: int) -> None:
    """Returns when something listens at HOST:PORT. Raises TimeoutError if nothing does."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no process 0 at {address} within {timeout} s ({error.strerror or error})"
                ) from error
        time.sleep(0.2)


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """All devices as a (data, fsdp) mesh. Raises ValueError if `fsdp` does not divide their number."""
    devices = devices if devices is not None else jax.devices()
    if fsdp < 1 or len(devices) % fsdp:
        raise ValueError(f"mesh.fsdp is {fsdp}; it must divide the number of devices, {len(devices)}")
    grid = np.array(devices).reshape(len(devices) // fsdp, fsdp)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def by_row(mesh: Mesh) -> NamedSharding:
    """The first axis (queries, documents) is split over all devices."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """A NamedSharding for every leaf of a (possibly abstract) tree of parameters or optimiser state."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        spec = next(spec for pattern, spec in PARAMETER_RULES if re.search(pattern, name))
        if len(spec) > len(leaf.shape):
            spec = P()
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis and size % mesh.shape[axis]:
                raise ValueError(f"{name} {leaf.shape}: {size} is not divisible by mesh.{axis} = {mesh.shape[axis]}")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def shard_batch(mesh: Mesh, batch: Tree) -> Tree:
    """Host arrays holding this process's rows -> global arrays split by row over the mesh."""
    sharding = by_row(mesh)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), batch)


def place_rows(mesh: Mesh, batch: Tree) -> Tree:
    """Host arrays that every process holds whole -> global arrays split by row over the mesh."""
    sharding = by_row(mesh)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch)


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; all of them must ask, and all get the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def from_first_process(text: str) -> str:
    """The text (of at most 4,096 bytes) that process 0 gives; all of them must ask."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode()[:4096].ljust(4096, b"\0"), np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(data))
    return told.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


def wait_for_all() -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wait_for_all")


class Program:
    """A jitted function that counts how many programs it was compiled to: one for each shape of its input."""

    def __init__(self, function: Callable[..., Any], **jit_options: Any) -> None:
        self.count = 0

        def traced(*arguments: Any) -> Any:
            self.count += 1  # runs when JAX traces, not when the compiled program runs
            return function(*arguments)

        self._jitted = jax.jit(traced, **jit_options)

    def __call__(self, *arguments: Any) -> Any:
        return self._jitted(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """What JAX would compile for these arguments, which may be abstract (jax.stages.Traced)."""
        return self._jitted.trace(*arguments)
