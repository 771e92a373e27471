"""The mesh of devices, and the sharding of every parameter: the first pattern that matches its path decides."""

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

ROW_AXES = ("data", "fsdp")  # axes of the mesh over which the rows of a batch are split
TENSOR = "tensor"  # the third axis, if mesh.tensor is above 1: over it, kernels of each layer are split

# Matches the paths of parameters in a stack of scanned layers. ModernBERT's later_layers are one parameter, no stack.
LAYER_PATH = r"\b(?!later_)(\w+_)?layers/"
# Scanned layers have a leading layer axis. Kernels of layers, and of a head's projection to the vocabulary, are split
# over "fsdp" by input features, tables by hidden size. Small parameters are replicated. The path of optimizer state
# contains the parameter's path, so the same rules apply to it. In layers of language models
# (models/encoders/architectures/decoder.py), "tensor" splits the columns of kernels that read hidden states (by heads,
# or by features of the feed-forward network), and the rows of kernels whose products are added to hidden states.
# Adapters and biases are split like their kernels.
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
    """Return a pytree path as text, such as "a/b/0"."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def map_with_names(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Return the tree of `function(path, leaf)` for all leaves of a tree."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_name(path), leaf), tree)


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None, tensor: int = 1) -> Mesh:
    """Return the mesh of all devices with the axes (data, fsdp), and with a third axis if `tensor` is above 1.

    Args:
        fsdp: size of this axis; 0: all devices that `tensor` leaves.
        devices: devices of the mesh; None: all devices of the job.
        tensor: size of this axis.

    Raises:
        ValueError: the sizes do not divide the number of devices.
        RuntimeError: the process is a fork of one that used devices.
    """
    require_unforked()
    if devices is None and jax.process_count() > 1 and jax.local_device_count() % max(tensor, 1):
        raise ValueError(
            f"mesh.tensor is {tensor}; it must divide the number of devices of a process, {jax.local_device_count()}, "
            "because devices that share a layer read the same rows"
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
    """Return whether the mesh is one CPU device."""
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"


def row_parts(mesh: Mesh) -> int:
    """Return the number of parts into which rows are split. Devices along "tensor" have the same rows."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, P())


def row_sharding(mesh: Mesh, stacked: bool = False) -> NamedSharding:
    """Return the sharding of rows over devices, along the first axis, or along the second axis of stacked batches."""
    return NamedSharding(mesh, P(None, ROW_AXES) if stacked else P(ROW_AXES))


def parameter_spec(name: str, axes: Collection[str] = ("fsdp",)) -> P:
    """Return the partition of the parameter with the path `name` over `axes` of the mesh."""
    spec = next(spec for pattern, spec in PARAMETER_RULES if re.search(pattern, name))
    entries = [tuple(axis for axis in names_of(entry) if axis in axes) for entry in spec]
    return P(*(entry if len(entry) > 1 else next(iter(entry), None) for entry in entries)) if any(entries) else P()


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the names of the axes in an entry of a partition."""
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh over which parameters are split."""
    return tuple(axis for axis in ("fsdp", TENSOR) if mesh.shape.get(axis, 1) > 1)


def place_leaf(leaf: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return a global array whose shards are copies, cut on the host.

    The training step donates its arrays. Therefore two shards, or two encoders with the same initial weights, must not
    share memory.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """Return a NamedSharding for every leaf of a tree of parameters or optimizer state, or of their shapes."""

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


def parameter_specs(mesh: Mesh, tree: Tree) -> Tree:
    """Return the partition of every leaf, see `shardings`, for shard_map."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings(mesh, tree))


def sharded_shapes(mesh: Mesh, tree: Tree) -> Tree:
    """Return the shapes and types of the leaves with their `shardings`."""

    def shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape, tree, shardings(mesh, tree))


def place_tree(mesh: Mesh, tree: Tree) -> Tree:
    """Return the leaves on the mesh with their `shardings`, see `place_leaf`."""
    return jax.tree.map(place_leaf, tree, shardings(mesh, tree))


@dataclass(frozen=True)
class ParameterGatherer:
    """Gathers the parameters that a device needs inside `jax.shard_map`, and reduces their gradients.

    Only here do parameters and gradients cross devices. Forward, a part is rounded to `dtype` and gathered over "fsdp".
    Backward, the gradient is summed over all devices in `reduce_dtype`, and each device keeps its part. GSPMD would
    choose types and places of these collectives itself. Here they are fixed, and the gradient of a parameter is reduced
    once. Nothing is reduced for a frozen parameter.
    """

    dtype: Any  # type in which parts are gathered
    reduce_dtype: Any  # type in which gradients of kernels and tables are summed; other gradients use float32
    axes: tuple[str, ...]  # axes of the mesh over which parameters are split (`split_axes`)
    tensor: int  # mesh.tensor: devices that share each layer's products; parts along this axis are not gathered
    # Whether layers are gathered at the entry instead of inside the scan. Layers that run several times (for chunks, or
    # in a tied encoder) then sum their gradients only once.
    at_once: bool = False
    # Whether kernels of layers have no gradient, as with adapters. They are always gathered inside the scan, because
    # there is no sum to save, and the full base may not fit into memory.
    frozen: bool = False

    @classmethod
    def of(cls, mesh: Mesh, dtype: Any, reduce_dtype: Any = jnp.float32, **options: bool) -> ParameterGatherer:
        """Return the gatherer of a mesh's parameters.

        Args:
            dtype, reduce_dtype: fields of the class.
            options: the fields `at_once` and `frozen`.
        """
        return cls(dtype, reduce_dtype, split_axes(mesh), mesh.shape.get(TENSOR, 1), **options)

    def gather_at_entry(self, params: Tree) -> Tree:
        """Return the parameters for the entry of the shard_map: gathered, except for layers that the scan gathers."""
        return map_with_names(lambda name, x: x if self.in_scan(name) else self._gather(name, x, 0), params)

    def gather_layer(self, params: Tree) -> Tree:
        """Return the gathered parameters of one layer inside the scan, without the leading layer axis."""

        def read(name: str, x: jax.Array) -> jax.Array:
            return self._gather(f"layers/{name}", x, 1) if self.in_scan(f"layers/{name}") else x

        return map_with_names(read, params)

    def in_scan(self, name: str) -> bool:
        """Return whether the parameter with the path `name` is gathered inside the scan instead of at the entry."""
        always_in_scan = "fsdp" in self.axes and self.frozen and name.endswith("kernel")
        return bool(re.search(LAYER_PATH, name)) and (always_in_scan or not self.at_once)

    def _gather(self, name: str, x: jax.Array, leading_axes: int) -> jax.Array:
        spec = parameter_spec(name, self.axes)
        axis = next((index - leading_axes for index, entry in enumerate(spec) if "fsdp" in names_of(entry)), None)
        large = name.endswith(("kernel", "embedding"))  # other parameters are so small that their type does not matter
        stacked = bool(re.search(LAYER_PATH, name))
        return _gather(x, axis, self.dtype, self.reduce_dtype if large else jnp.float32, stacked)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool) -> jax.Array:
    """Return the full parameter on every device.

    Args:
        x: a parameter, or this device's part of it.
        axis: axis that is split over devices; None: every device has the full parameter.
        dtype: type in which parts are gathered.
        reduce_dtype: type in which gradients are summed.
        stacked: whether x belongs to a stack of layers.
    """
    if axis is None:
        return jax.lax.pcast(x, ROW_AXES, to="varying")
    full_parameter = jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)
    return jax.lax.pcast(full_parameter, "data", to="varying").astype(x.dtype)


def _gather_forward(
    x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool
) -> tuple[jax.Array, None]:
    return _gather(x, axis, dtype, reduce_dtype, stacked), None


def _gather_backward(
    axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    total = gradient.astype(reduce_dtype)
    if axis is not None:
        total = _scatter(total, axis, stacked)
    return (jax.lax.psum(total, ROW_AXES if axis is None else "data").astype(gradient.dtype),)


def _scatter(gradient: jax.Array, axis: int, stacked: bool) -> jax.Array:
    """Sum a gradient over "fsdp", and return this device's part along `axis`."""
    if stacked:
        return jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True)
    # For tables, a TPU's compiler turns psum_scatter into an all-reduce and a slice, twice the bytes of an all-to-all
    # (tests/plan/watched_programs.py bounds them).
    parts = jax.lax.all_to_all(gradient, "fsdp", split_axis=axis, concat_axis=0, tiled=True)
    count = jax.lax.axis_size("fsdp")
    part_shape = tuple(n // count if i == axis else n for i, n in enumerate(gradient.shape))
    return jnp.sum(parts.reshape(count, *part_shape), axis=0)


_gather.defvjp(_gather_forward, _gather_backward)


def shard_batch(mesh: Mesh, batch: Tree, stacked: bool = False) -> Tree:
    """Return global arrays, split by rows over the mesh, from host arrays with the rows of this process."""
    require_unforked()
    sharding = row_sharding(mesh, stacked)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), batch)


def shard_whole_batch(mesh: Mesh, batch: Tree) -> Tree:
    """Return global arrays, split by rows over the mesh, from host arrays with all rows in every process."""
    require_unforked()
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch)


class Program:
    """A jitted function that counts its compiled programs, one for each shape of its input."""

    def __init__(self, function: Callable[..., Any], **jit_options: Any) -> None:
        self.count = 0

        def traced(*arguments: Any) -> Any:
            self.count += 1  # runs when JAX traces the function, not when the compiled program runs
            return function(*arguments)

        self._program = jax.jit(traced, **jit_options)

    def __call__(self, *arguments: Any) -> Any:
        return self._program(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """Return the trace (jax.stages.Traced) for arguments, or for their shapes."""
        return self._program.trace(*arguments)
