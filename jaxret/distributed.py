"""Processes, the mesh, and where every parameter lies (by its path; the first matching pattern wins)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.clusters import ClusterEnv  # not public, but jax.distributed does not say what it would find
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jaxret.checkpoint import path_name
from jaxret.memory import keep_freed_memory
from jaxret.rendezvous import meet

Tree = Any
ROWS = ("data", "fsdp")  # the axes of the mesh: rows of a batch are split over both

# Scanned layers have a leading layer axis. Kernels of layers, and of a head's projection to the vocabulary, are split
# over "fsdp" by input features, tables by hidden size; everything small is replicated. Optimiser state carries the
# parameter's path in its own, so it follows.
# A stack of scanned layers, by the path of what is in it. ModernBERT's later_layers are one parameter, not a stack.
LAYERS = r"\b(?!later_)(\w+_)?layers/"
PARAMETER_RULES: tuple[tuple[str, P], ...] = (
    (r"layers/.*kernel$", P(None, "fsdp", None)),
    (r"\bvocabulary/kernel$", P("fsdp", None)),
    (r"\b(word|position|type)/embedding$", P(None, "fsdp")),
    (r"", P()),
)

# Platform -> what an environment for it is installed from.
REQUIREMENTS = {"tpu": "requirements-tpu.txt", "gpu": "requirements-gpu.txt", "cpu": "requirements.txt"}


def begin(mesh: ConfigDict) -> None:
    """What a verb with a config does before its first array: keeps freed memory, and joins the job that `config.mesh`
    describes. Raises what `initialize` raises."""
    keep_freed_memory()
    initialize(mesh.coordinator, mesh.num_processes, mesh.process_id, mesh.initialization_timeout, "--config.mesh.")


def initialize(
    coordinator: str = "", num_processes: int = 1, process_id: int = 0, timeout: int = 300, where: str = "--"
) -> None:
    """Joins a multi-process job. On one process with no coordinator nothing happens.

    coordinator: "host:port" of process 0, or "auto" where the platform knows (TPU pods, Slurm). timeout: seconds that
    the processes wait for each other. where: what the names of the settings begin with, for errors. Raises ValueError
    if the settings do not fit together, and RendezvousError, in every process that came, with those that did not.
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
    devices: Sequence[int] | None = None
    if coordinator == "auto":
        coordinator, num_processes, process_id, devices = _from_the_platform(timeout, where)
    if num_processes > 1:
        meet(coordinator, num_processes, process_id, float(timeout))
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=devices,
        initialization_timeout=timeout,
        cluster_detection_method="deactivate",  # everything is known by now
    )


def _from_the_platform(timeout: int, where: str) -> tuple[str, int, int, Sequence[int] | None]:
    """Coordinator, number of processes, which this is, and its devices (None: all of the host's), as JAX finds them."""
    unset = (None,) * 5
    coordinator, count, own, devices = ClusterEnv.auto_detect_unset_distributed_params(*unset, timeout)
    if coordinator is None or count is None or own is None:
        raise ValueError(
            f"{where}coordinator=auto: no TPU pod is here, nor a process that srun started; give {where}coordinator="
            f"HOST:PORT, {where}num_processes and {where}process_id"
        )
    # Under Slurm JAX takes one device for each task, also for the only task of a host that has eight.
    if os.environ.get("SLURM_NTASKS", "") == os.environ.get("SLURM_STEP_NUM_NODES"):
        devices = None
    return coordinator, count, own, devices


def require_platform(platform: str, setting: str) -> None:
    """Raises ValueError unless JAX runs on "tpu", "gpu" or "cpu", as asked; on a machine that has more than a CPU,
    "cpu" leaves the rest alone. "": any. setting: what `platform` is called, for the error.

    JAX itself goes on with the CPU where it finds no accelerator.
    """
    if platform not in ("", *REQUIREMENTS):
        raise ValueError(f"{setting} is {platform!r}; it must be one of {', '.join(REQUIREMENTS)}, or empty for any")
    if not platform:
        return
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        device, *others = jax.local_devices()
        found = f"{1 + len(others)} of {device.platform} ({device.device_kind})"
        if device.platform == platform:
            return
    except RuntimeError as error:  # JAX_PLATFORMS names one that is not there
        found = str(error).splitlines()[0]
    asked = f", where JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']}," if os.environ.get("JAX_PLATFORMS") else ""
    raise ValueError(
        f"{setting} is {platform!r}, and what JAX finds here{asked} is: {found}. A {platform.upper()} needs its driver "
        f"and an environment installed from {REQUIREMENTS[platform]}"
    )


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """All devices as a (data, fsdp) mesh. Raises ValueError if `fsdp` does not divide their number."""
    devices = devices if devices is not None else jax.devices()
    if fsdp < 1 or len(devices) % fsdp:
        raise ValueError(f"mesh.fsdp is {fsdp}; it must divide the number of devices, {len(devices)}")
    grid = np.array(devices).reshape(len(devices) // fsdp, fsdp)
    return Mesh(grid, ROWS, axis_types=(AxisType.Auto,) * 2)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def by_row(mesh: Mesh, stacked: bool = False) -> NamedSharding:
    """The first axis (queries, documents) is split over all devices; of stacked batches, the second."""
    return NamedSharding(mesh, P(None, ROWS) if stacked else P(ROWS))


def rule(name: str) -> P:
    """Where the parameter of this path lies."""
    return next(spec for pattern, spec in PARAMETER_RULES if re.search(pattern, name))


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """A NamedSharding for every leaf of a (possibly abstract) tree of parameters or optimiser state."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        spec = rule(name)
        if len(spec) > len(leaf.shape):
            spec = P()
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis and size % mesh.shape[axis]:
                raise ValueError(f"{name} {leaf.shape}: {size} is not divisible by mesh.{axis} = {mesh.shape[axis]}")
        return NamedSharding(mesh, spec if mesh.shape["fsdp"] > 1 else P())

    return jax.tree_util.tree_map_with_path(place, tree)


@dataclass(frozen=True)
class Reader:
    """How a device reads parameters inside `jax.shard_map` over a mesh of `make_mesh`, where it holds a part of some.

    Reading is the only place where parameters travel and gradients are added up over devices: forward a part is rounded
    to `dtype` and gathered over "fsdp"; backward the gradient is added up over all devices in `reduce_dtype`, each
    keeping its part. Every parameter is read once: in its layer, or, if it is in none or `at_once`, at the entry. There
    the layers belong if they are used several times (chunks, a tied encoder), for gradients to be added up once.
    """

    dtype: Any
    reduce_dtype: Any
    at_once: bool
    split: bool  # whether there are parts: mesh.fsdp is above 1

    def entry(self, params: Tree) -> Tree:
        """All parameters, as the body of the shard_map gets them: whole, but for those that layers read themselves."""

        def read(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            name = path_name(path)
            if re.search(LAYERS, name) and not self.at_once:
                return x
            return self._read(name, x, 0)

        return jax.tree_util.tree_map_with_path(read, params)

    def layer(self, params: Tree) -> Tree:
        """The parameters of one layer of a stack, inside the scan: without the leading axis."""
        if self.at_once:
            return params
        return jax.tree_util.tree_map_with_path(lambda p, x: self._read(f"layers/{path_name(p)}", x, 1), params)

    def _read(self, name: str, x: jax.Array, scanned: int) -> jax.Array:
        spec = rule(name)
        axis = spec.index("fsdp") - scanned if self.split and "fsdp" in spec else None
        large = name.endswith(("kernel", "embedding"))  # the others are too small to save anything
        stacked = bool(re.search(LAYERS, name))
        return _read(x, axis, self.dtype, self.reduce_dtype if large else jnp.float32, stacked)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _read(x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool) -> jax.Array:
    """x whole, on every device its own copy. axis: along which devices hold parts; None: x is on all of them. stacked:
    whether x belongs to layers."""
    if axis is None:
        return jax.lax.pcast(x, ROWS, to="varying")
    whole = jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)
    return jax.lax.pcast(whole, "data", to="varying").astype(x.dtype)


def _read_forward(
    x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool
) -> tuple[jax.Array, None]:
    return _read(x, axis, dtype, reduce_dtype, stacked), None


def _read_backward(
    axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool, _: None, g: jax.Array
) -> tuple[jax.Array]:
    total = g.astype(reduce_dtype)
    if axis is not None:
        total = _scatter(total, axis, stacked)
    return (jax.lax.psum(total, ROWS if axis is None else "data").astype(g.dtype),)


def _scatter(g: jax.Array, axis: int, stacked: bool) -> jax.Array:
    """The sum over "fsdp", of which each device keeps its part along `axis`."""
    if stacked:
        return jax.lax.psum_scatter(g, "fsdp", scatter_dimension=axis, tiled=True)
    # Of a table, a TPU's compiler adds up all of it everywhere and then cuts: twice the bytes of handing out the parts.
    parts = jax.lax.all_to_all(g, "fsdp", split_axis=axis, concat_axis=0, tiled=True)
    count = jax.lax.axis_size("fsdp")
    own = tuple(n // count if i == axis else n for i, n in enumerate(g.shape))
    return jnp.sum(parts.reshape(count, *own), axis=0)


_read.defvjp(_read_forward, _read_backward)


def shard_batch(mesh: Mesh, batch: Tree, stacked: bool = False) -> Tree:
    """Host arrays holding this process's rows -> global arrays split by row over the mesh."""
    sharding = by_row(mesh, stacked)
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
