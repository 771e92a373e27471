"""The mesh, and the sharding of every parameter (by its path; the first matching pattern wins)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.parallel.forks import require_unforked

Tree = Any
ROWS = ("data", "fsdp")  # the axes of the mesh: rows of a batch are split over both

# Matches paths of parameters in a stack of scanned layers. ModernBERT's later_layers are one parameter, not a stack.
LAYERS = r"\b(?!later_)(\w+_)?layers/"
# Scanned layers have a leading layer axis. Kernels of layers, and of a head's projection to the vocabulary, are split
# over "fsdp" by input features, tables by hidden size; small parameters are replicated. The path of optimiser state
# contains the parameter's path, so the same rules apply to it.
PARAMETER_RULES: tuple[tuple[str, P], ...] = (
    (r"layers/.*kernel$", P(None, "fsdp", None)),
    (r"\bvocabulary/kernel$", P("fsdp", None)),
    (r"\b(word|position|type)/embedding$", P(None, "fsdp")),
    (r"", P()),
)


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as "a/b/0"."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def map_with_names(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Return a tree with `function(path, leaf)` of every leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_name(path), leaf), tree)


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """Return all devices as a (data, fsdp) mesh; fsdp 0: all of them. Raises ValueError if `fsdp` does not divide their
    number, RuntimeError in a forked process."""
    require_unforked()
    devices = devices if devices is not None else jax.devices()
    fsdp = fsdp or len(devices)
    if fsdp < 1 or len(devices) % fsdp:
        raise ValueError(f"mesh.fsdp is {fsdp}; it must divide the number of devices, {len(devices)}")
    grid = np.array(devices).reshape(len(devices) // fsdp, fsdp)
    return Mesh(grid, ROWS, axis_types=(AxisType.Auto,) * 2)


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def row_sharding(mesh: Mesh, stacked: bool = False) -> NamedSharding:
    """Return the sharding of rows over all devices, along the first axis; for stacked batches, the second."""
    return NamedSharding(mesh, P(None, ROWS) if stacked else P(ROWS))


def parameter_spec(name: str) -> P:
    """Return the partition of the parameter with this path."""
    return next(spec for pattern, spec in PARAMETER_RULES if re.search(pattern, name))


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
    """Return a NamedSharding for every leaf of a (possibly abstract) tree of parameters or optimiser state."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        spec = parameter_spec(name)
        if len(spec) > len(leaf.shape):
            spec = P()
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis and size % mesh.shape[axis]:
                raise ValueError(f"{name} {leaf.shape}: {size} is not divisible by mesh.{axis} = {mesh.shape[axis]}")
        return NamedSharding(mesh, spec if mesh.shape["fsdp"] > 1 else P())

    return jax.tree_util.tree_map_with_path(place, tree)


@dataclass(frozen=True)
class ParameterGatherer:
    """Gathers the parameters that a device needs inside `jax.shard_map`, and reduces their gradients.

    It is the only place where parameters and gradients cross devices. Forward, a part is rounded to `dtype` and
    gathered over "fsdp"; backward, the gradient is summed over all devices in `reduce_dtype`, and each keeps its part.
    GSPMD would choose the types and places of these collectives itself. Here both are fixed: parts travel in `dtype`,
    sums have `reduce_dtype`, and the gradient of a parameter is reduced once. Nothing is reduced for a frozen one.

    Attributes:
        dtype: Type in which parts are gathered.
        reduce_dtype: Type in which gradients of kernels and tables are summed; others use float32.
        at_once: Whether layers are gathered at the entry instead of inside the scan. For layers that run several times
            (chunks, a tied encoder): their gradients are then summed once.
        split: Whether parameters are split: mesh.fsdp is above 1.
        frozen: Whether kernels of layers have no gradient, as under adapters. They are gathered inside the scan each
            time: there is no sum to save, and a whole base may not fit.
    """

    dtype: Any
    reduce_dtype: Any
    at_once: bool
    split: bool
    frozen: bool = False

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
        again = self.split and self.frozen and name.endswith("kernel")
        return bool(re.search(LAYERS, name)) and (again or not self.at_once)

    def _read(self, name: str, x: jax.Array, scanned: int) -> jax.Array:
        spec = parameter_spec(name)
        axis = spec.index("fsdp") - scanned if self.split and "fsdp" in spec else None
        large = name.endswith(("kernel", "embedding"))  # other parameters are too small to matter
        stacked = bool(re.search(LAYERS, name))
        return _read(x, axis, self.dtype, self.reduce_dtype if large else jnp.float32, stacked)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _read(x: jax.Array, axis: int | None, dtype: Any, reduce_dtype: Any, stacked: bool) -> jax.Array:
    """Return x whole on every device.

    Args:
        x: A parameter, or this device's part of it.
        axis: Axis that is split over devices; None: every device has all of x.
        dtype: Type in which parts are gathered.
        reduce_dtype: Type in which gradients are summed.
        stacked: Whether x belongs to a stack of layers.
    """
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
    """Sum over "fsdp" and return this device's part along `axis`."""
    if stacked:
        return jax.lax.psum_scatter(g, "fsdp", scatter_dimension=axis, tiled=True)
    # For tables, a TPU's compiler lowers psum_scatter to an all-reduce and a slice: twice the bytes of an all-to-all.
    parts = jax.lax.all_to_all(g, "fsdp", split_axis=axis, concat_axis=0, tiled=True)
    count = jax.lax.axis_size("fsdp")
    own = tuple(n // count if i == axis else n for i, n in enumerate(g.shape))
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

        self._jitted = jax.jit(traced, **jit_options)

    def __call__(self, *arguments: Any) -> Any:
        return self._jitted(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """Return the trace (jax.stages.Traced) for these arguments, which may be abstract."""
        return self._jitted.trace(*arguments)
