"""The mesh, and the sharding of every parameter (by its path; the first matching pattern wins)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.parallel.forks import require_unforked
from jaxret.types import Tree

ROW_AXES = ("data", "fsdp")  # axes of the mesh: rows of a batch are split over both
TENSOR = "tensor"  # the third axis, where mesh.tensor is above 1: parts of each layer's kernels

# Matches paths of parameters in a stack of scanned layers. ModernBERT's later_layers are one parameter, not a stack.
LAYER_PATH = r"\b(?!later_)(\w+_)?layers/"
# Scanned layers have a leading layer axis. Kernels of layers, and of a head's projection to the vocabulary, are split
# over "fsdp" by input features, tables by hidden size; small parameters are replicated. The path of optimizer state
# contains the parameter's path, so the same rules apply to it. In layers of language models, "tensor" splits columns of
# kernels that read hidden states (whole heads, numbers of the feed-forward), and rows of kernels whose products are
# added to hidden states (models/encoders/decoder.py); adapters and biases follow their kernels.
READING, ADDING = r"layers/.*\b(query|key|value|gate|wide)/", r"layers/.*\b(output|narrow)/"
PARAMETER_RULES: tuple[tuple[str, P], ...] = (
    (READING + r"kernel$", P(None, "fsdp", TENSOR)),
    (READING + r"lora_b$", P(None, None, TENSOR)),
    (READING + r"bias$", P(None, TENSOR)),
    (ADDING + r"kernel$", P(None, (TENSOR, "fsdp"), None)),
    (ADDING + r"lora_a$", P(None, TENSOR, None)),
    (r"layers/.*kernel$", P(None, "fsdp", None)),
    (r"\bvocabulary/kernel$", P("fsdp", None)),
    (r"\b(word|position|type)/embedding$", P(None, "fsdp")),
    (r"", P()),
)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a pytree path as "a/b/0"."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def map_with_names(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Return a tree with `function(path, leaf)` of every leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_name(path), leaf), tree)


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None, tensor: int = 1) -> Mesh:
    """Return all devices as a (data, fsdp) mesh, or with `tensor` above 1 as a (data, fsdp, tensor) mesh; fsdp 0: all
    that `tensor` leaves. Raises ValueError if they do not divide the number of devices, RuntimeError in a forked
    process."""
    require_unforked()
    if devices is None and jax.process_count() > 1 and jax.local_device_count() % max(tensor, 1):
        raise ValueError(
            f"mesh.tensor is {tensor}; it must divide the devices of a process, {jax.local_device_count()}: devices "
            "that share a layer read the same rows"
        )
    devices = devices if devices is not None else jax.devices()
    if tensor < 1 or len(devices) % tensor:
        raise ValueError(f"mesh.tensor is {tensor}; it must divide the number of devices, {len(devices)}")
    fsdp = fsdp or len(devices) // tensor
    if fsdp < 1 or len(devices) % (fsdp * tensor):
        factor = f" x mesh.tensor {tensor}" if tensor > 1 else ""
        raise ValueError(f"mesh.fsdp is {fsdp}{factor}; it must divide the number of devices, {len(devices)}")
    grid = np.array(devices).reshape(-1, fsdp, tensor)
    if tensor > 1:
        return Mesh(grid, (*ROW_AXES, TENSOR), axis_types=(AxisType.Auto,) * 3)
    return Mesh(grid[..., 0], ROW_AXES, axis_types=(AxisType.Auto,) * 2)


def is_one_cpu(mesh: Mesh) -> bool:
    """Return whether the mesh is the CPU of one process alone."""
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"


def row_parts(mesh: Mesh) -> int:
    """Return over how many devices rows are split: those along "tensor" have the same rows."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def row_sharding(mesh: Mesh, stacked: bool = False) -> NamedSharding:
    """Return the sharding of rows over all devices, along the first axis; for stacked batches, the second."""
    return NamedSharding(mesh, P(None, ROW_AXES) if stacked else P(ROW_AXES))


def parameter_spec(name: str, axes: Collection[str] = ("fsdp",)) -> P:
    """Return the partition of the parameter with this path over some axes of the mesh."""
    spec = next(spec for pattern, spec in PARAMETER_RULES if re.search(pattern, name))
    entries = [tuple(axis for axis in names_of(entry) if axis in axes) for entry in spec]
    return P(*(entry if len(entry) > 1 else next(iter(entry), None) for entry in entries)) if any(entries) else P()


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the axes of the mesh in an entry of a partition."""
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that parameters are split over."""
    return tuple(axis for axis in ("fsdp", TENSOR) if mesh.shape.get(axis, 1) > 1)


def place_leaf(leaf: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return a global array whose shards are copies, each cut on the host.

    The training step donates its arrays, so no two shards, and no two encoders made from one set of weights, may share
    memory.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """Return a NamedSharding for every leaf of a (possibly abstract) tree of parameters or optimizer state."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        spec = parameter_spec(name, split_axes(mesh))
        if len(spec) > len(leaf.shape):
            spec = P()
        for size, entry in zip(leaf.shape, spec, strict=False):
            if size % (parts := math.prod(mesh.shape[axis] for axis in names_of(entry))):
                keys = " x ".join(f"mesh.{axis}" for axis in names_of(entry))
                raise ValueError(f"{name} {leaf.shape}: {size} is not divisible by {keys} = {parts}")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


@dataclass(frozen=True)
class ParameterGatherer:
    """Gathers the parameters that a device needs inside `jax.shard_map`, and reduces their gradients.

    It is the only place where parameters and gradients cross devices. Forward, a part is rounded to `dtype` and
    gathered over "fsdp"; backward, the gradient is summed over all devices in `reduce_dtype`, and each keeps its part.
    GSPMD would choose the types and places of these collectives itself. Here both are fixed: parts travel in `dtype`,
    sums have `reduce_dtype`, and the gradient of a parameter is reduced once. Nothing is reduced for a frozen one.
    """

    dtype: Any  # Type in which parts are gathered
    reduce_dtype: Any  # Type in which gradients of kernels and tables are summed; others use float32
    axes: tuple[str, ...]  # Of the mesh, over which parameters are split (`split_axes`)
    tensor: int  # Devices that share each layer's products: mesh.tensor. Parts along this axis are not gathered.
    # Whether layers are gathered at the entry instead of inside the scan. For layers that run several times (chunks, a
    # tied encoder): their gradients are then summed once.
    at_once: bool = False
    # Whether kernels of layers have no gradient, as under adapters. They are gathered inside the scan each time: there
    # is no sum to save, and a whole base may not fit.
    frozen: bool = False

    @classmethod
    def of(cls, mesh: Mesh, dtype: Any, reduce_dtype: Any = jnp.float32, **options: bool) -> ParameterGatherer:
        """Return the gatherer of a mesh's parameters.

        Args:
            dtype, reduce_dtype: as in the class.
            options: `at_once` and `frozen`.
        """
        return cls(dtype, reduce_dtype, split_axes(mesh), mesh.shape.get(TENSOR, 1), **options)

    def gather_at_entry(self, params: Tree) -> Tree:
        """Return the parameters at the entry of the shard_map: gathered, except for layers that the scan gathers."""
        return map_with_names(lambda name, x: x if self.in_scan(name) else self._read(name, x, 0), params)

    def gather_layer(self, params: Tree) -> Tree:
        """Return the gathered parameters of one layer inside the scan, without the leading layer axis."""

        def read(name: str, x: jax.Array) -> jax.Array:
            return self._read(f"layers/{name}", x, 1) if self.in_scan(f"layers/{name}") else x

        return map_with_names(read, params)

    def in_scan(self, name: str) -> bool:
        """Return whether the parameter with this path is gathered inside the scan, and not at the entry."""
        again = "fsdp" in self.axes and self.frozen and name.endswith("kernel")
        return bool(re.search(LAYER_PATH, name)) and (again or not self.at_once)

    def _read(self, name: str, x: jax.Array, leading_axes: int) -> jax.Array:
        spec = parameter_spec(name, self.axes)
        axis = next((place - leading_axes for place, entry in enumerate(spec) if "fsdp" in names_of(entry)), None)
        large = name.endswith(("kernel", "embedding"))  # other parameters are too small to matter
        stacked = bool(re.search(LAYER_PATH, name))
        return _read(x, axis, self.dtype, self.reduce_dtype if large else jnp.float32, stacked)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _read(x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool) -> jax.Array:
    """Return x whole on every device.

    Args:
        x: a parameter, or this device's part of it.
        axis: axis that is split over devices; None: every device has all of x.
        dtype: type in which parts are gathered.
        reduce_dtype: type in which gradients are summed.
        stacked: whether x belongs to a stack of layers.
    """
    if axis is None:
        return jax.lax.pcast(x, ROW_AXES, to="varying")
    whole = jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)
    return jax.lax.pcast(whole, "data", to="varying").astype(x.dtype)


def _read_forward(
    x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool
) -> tuple[jax.Array, None]:
    return _read(x, axis, dtype, reduce_dtype, stacked), None


def _read_backward(
    axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    total = gradient.astype(reduce_dtype)
    if axis is not None:
        total = _scatter(total, axis, stacked)
    return (jax.lax.psum(total, ROW_AXES if axis is None else "data").astype(gradient.dtype),)


def _scatter(gradient: jax.Array, axis: int, stacked: bool) -> jax.Array:
    """Sum over "fsdp" and return this device's part along `axis`."""
    if stacked:
        return jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True)
    # For tables, a TPU's compiler lowers psum_scatter to an all-reduce and a slice: twice the bytes of an all-to-all.
    parts = jax.lax.all_to_all(gradient, "fsdp", split_axis=axis, concat_axis=0, tiled=True)
    count = jax.lax.axis_size("fsdp")
    own = tuple(n // count if i == axis else n for i, n in enumerate(gradient.shape))
    return jnp.sum(parts.reshape(count, *own), axis=0)


_read.defvjp(_read_forward, _read_backward)


def shard_batch(mesh: Mesh, batch: Tree, stacked: bool = False) -> Tree:
    """Return global arrays, split by row over the mesh, from host arrays with this process's rows."""
    require_unforked()
    sharding = row_sharding(mesh, stacked)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), batch)


def shard_whole_batch(mesh: Mesh, batch: Tree) -> Tree:
    """Return global arrays, split by row over the mesh, from host arrays that every process holds whole."""
    require_unforked()
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch)


class Program:
    """A jitted function that counts its compiled programs: one for each shape of its input."""

    def __init__(self, function: Callable[..., Any], **jit_options: Any) -> None:
        self.count = 0

        def traced(*arguments: Any) -> Any:
            self.count += 1  # runs when JAX traces, not when the compiled program runs
            return function(*arguments)

        self._program = jax.jit(traced, **jit_options)

    def __call__(self, *arguments: Any) -> Any:
        return self._program(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """Return the trace (jax.stages.Traced) for these arguments, which may be abstract."""
        return self._program.trace(*arguments)
