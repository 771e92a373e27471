"""Search a corpus on the devices of this machine with one compiled program.

The rows of the corpus are divided into C cells: row r belongs to cell r % C. All devices hold equally many cells.
So the best rows of a query are spread evenly over all cells, wherever they are in the corpus, and a cell returns little
more than its share of the k best rows. The bound that the proof needs (`proof.py`) covers the scores that a cell leaves
out: if a share was too small, the query is searched again, and no result is lost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.search.backends import cpu, gpu_kernel
from jaxret.search.backends.precision import Compressed, Precision, compress
from jaxret.search.backends.top_k import best, best_of_cell, highest, merge, power_of_two, rounded_size, share
from jaxret.search.proof import BlockHits

# The largest number of vectors of a cell. Its scores with 1,024 queries take 128 MiB.
CELL = 32_768
# On a TPU the scores take 16 MiB. XLA keeps them in the memory on the chip until it has selected the best of them.
# Larger scores would be moved to or from the main memory six times (docs/scale.md).
TPU_CELL = 4_096
# On a GPU with the kernel of `gpu_kernel.py`, which writes only maxima: these take 512 MiB.
MAXIMA_CELL = 2**20
MAXIMA_NUMBERS = 2**30  # largest number of values in the vectors of such a cell, because a cell may be copied
CHUNK_BYTES = 2**26  # float32 vectors that are copied to the devices at a time
ROW_AXIS = "rows"  # the axis of the mesh


class CellLayout(NamedTuple):
    """Positions of rows in cells: row r has position r // cells of cell r % cells."""

    cells: int  # number of cells on all devices
    size: int  # positions of a cell; the last ones may be empty
    width: int  # vectors of a row

    def chunk(self, dimension: int) -> int:
        """Return how many positions of every cell are filled at a time. The number divides `size`."""
        positions = self.size
        while positions % 2 == 0 and positions * self.cells * self.width * dimension * 4 > CHUNK_BYTES:
            positions //= 2
        return positions


def local_mesh() -> Mesh:
    """Return the mesh of this process's devices, whose only axis divides passages."""
    return Mesh(np.array(jax.local_devices()), (ROW_AXIS,), axis_types=(AxisType.Auto,))


def platform_of(mesh: Mesh) -> str:
    """Return JAX's name of the platform, or "cuda" for an NVIDIA GPU that Triton supports (Ampere or later)."""
    device = mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; an AMD GPU has "gfx90a"
    return "cuda" if re.fullmatch(r"([89]|\d\d+)\.\d+", capability) else str(device.platform)


def plan_cells(rows: int, shape: tuple[int, int], precision: Precision, devices: int, platform: str) -> CellLayout:
    """Return a layout of rows in cells.

    Args:
        rows: number of rows.
        shape: (vectors of a row, dimension).
        precision: precision of the vectors.
        devices: number of devices.
        platform: the result of `platform_of`.
    """
    width, cell, multiple, steps = shape[0], TPU_CELL if platform == "tpu" else CELL, 1, 16
    if gpu_kernel.can_take(platform, *shape, precision.dtype):  # cells are large, so sizes in finer steps waste less
        cell, multiple, steps = min(MAXIMA_CELL, MAXIMA_NUMBERS // shape[1]), gpu_kernel.TILE_POSITIONS, 128
    cells = devices * math.ceil(rows * width / (devices * cell))
    size = rounded_size(math.ceil(rows / cells), steps)
    return CellLayout(cells, -(-size // multiple) * multiple, width)


@dataclass(frozen=True)
class DeviceVectors:
    """The vectors of `rows` rows on the devices of a mesh."""

    mesh: Mesh
    layout: CellLayout
    rows: int
    precision: Precision
    vectors: Compressed  # numbers [cells, size * width, D], other arrays [cells, size * width]; sharded by cells

    def __call__(self, queries: np.ndarray, k: int) -> BlockHits:
        """Return the k rows with the highest scores of queries [Q,D] float32."""
        count, k = len(queries), min(k, self.rows)
        by_maxima = _by_maxima(self.vectors, self.layout, self.mesh)
        size = gpu_kernel.pad_to_tiles(count) if by_maxima else power_of_two(count)
        padded_queries = np.pad(queries, ((0, size - count), (0, 0)))
        computed_k = min(rounded_size(k), self.rows)
        compressed_queries = compress(padded_queries, self.precision)
        if platform_of(self.mesh) == "cpu" and self.mesh.size == 1:
            best_hits = cpu.search_cells_on_cpu(
                compressed_queries, self.vectors, self.rows, self.layout.size, computed_k
            )
        else:
            best_hits = search_cells(compressed_queries, self.vectors, self.rows, self.layout, computed_k, self.mesh)
        scores, rows, bound = (np.asarray(x)[:count] for x in best_hits)
        if k < computed_k:
            bound = np.maximum(bound, scores[:, k])
        return BlockHits(scores[:, :k], rows[:, :k].astype(np.int64), bound)


def put_on_devices(chunks: Iterable[np.ndarray], layout: CellLayout, precision: Precision, mesh: Mesh) -> DeviceVectors:
    """Put rows on the devices.

    Args:
        chunks: arrays [positions * cells, width, D] float32 of `layout.chunk` positions; the last may be shorter.
        layout: positions of rows in cells.
        precision: precision of the vectors on the devices.
        mesh: the devices.
    """
    sharding = NamedSharding(mesh, P(ROW_AXIS))
    vectors, rows = None, 0
    for chunk in chunks:
        dimension = chunk.shape[-1]
        positions = layout.chunk(dimension)
        padded_chunk = np.pad(chunk, ((0, positions * layout.cells - len(chunk)), (0, 0), (0, 0)))
        chunk_vectors = compress(padded_chunk.reshape(-1, dimension), precision)
        cells = jax.device_put(
            jax.tree.map(partial(_split_by_cell, layout=layout, positions=positions), chunk_vectors), sharding
        )
        if positions == layout.size:
            vectors = cells
        else:
            vectors = _empty(cells, layout, sharding) if vectors is None else vectors
            vectors = _fill(vectors, cells, rows // layout.cells * layout.width)
        rows += len(chunk)
    assert vectors is not None, "there are no rows"
    return DeviceVectors(mesh, layout, rows, precision, vectors)


def _split_by_cell(x: np.ndarray, layout: CellLayout, positions: int) -> np.ndarray:
    """Return an array [positions * cells * width, ...] as [cells, positions * width, ...]."""
    by_position = x.reshape(positions, layout.cells, layout.width, *x.shape[1:])
    return np.ascontiguousarray(by_position.swapaxes(0, 1)).reshape(
        layout.cells, positions * layout.width, *x.shape[1:]
    )


def _empty(like: Compressed, layout: CellLayout, sharding: NamedSharding) -> Compressed:
    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((layout.cells, layout.size * layout.width, *x.shape[2:]), x.dtype, device=sharding)

    return jax.tree.map(zeros, like)


@partial(jax.jit, donate_argnums=0)
def _fill(vectors: Compressed, chunk: Compressed, start: jax.Array | int) -> Compressed:
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1), vectors, chunk)


@partial(jax.jit, static_argnums=(3, 4, 5))
def search_cells(
    queries: Compressed, vectors: Compressed, rows: jax.Array | int, layout: CellLayout, k: int, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search the first `rows` rows of a layout.

    Each device searches its cells one after the other, and returns its share of the k best rows. Devices exchange
    nothing else.

    Args:
        queries: query vectors [Q,D].
        vectors: vectors of all cells.
        rows: number of rows that exist.
        layout: positions of rows in cells.
        k: rows to return for each query; if fewer exist, the result is padded with rows of score -inf.
        mesh: the devices.

    Returns:
        The scores of the k best rows [Q,k], descending; the rows [Q,k]; an upper bound of all other scores [Q].
    """
    by_maxima = _by_maxima(vectors, layout, mesh)
    per_cell = share(k, layout.cells, layout.size)
    per_device = min(k, share(k, mesh.size, layout.cells // mesh.size * layout.size))

    def device(
        queries: Compressed, rows: jax.Array, cells: jax.Array, vectors: Compressed
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def search_cell(cell: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number, part = cell  # the part is the cell's vectors, or for the kernel its index
            rows_of_cell = jnp.arange(layout.size) * layout.cells + number
            exists = rows_of_cell < rows
            if by_maxima:
                hits = best_by_maxima(queries, vectors, part, exists, per_cell, platform_of(mesh))
            else:
                hits = best_of_cell(queries, part, exists, per_cell)
            top, positions, bound = hits
            return top, rows_of_cell[positions], bound

        parts = jnp.arange(len(cells)) if by_maxima else vectors
        tops, cell_rows, bounds = jax.lax.map(search_cell, (cells, parts))  # [cells of the device, Q, ...]
        return jax.tree.map(lambda x: x[None], merge(tops, cell_rows, bounds.max(axis=0), per_device))

    specs = (P(), P(), P(ROW_AXIS), P(ROW_AXIS))
    # check_vma=False: a Pallas kernel does not declare on which devices its results differ.
    sharded_search = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P(ROW_AXIS), check_vma=not by_maxima)
    per_device_hits = sharded_search(queries, jnp.asarray(rows), jnp.arange(layout.cells), vectors)
    tops, positions, bounds = jax.lax.with_sharding_constraint(per_device_hits, NamedSharding(mesh, P()))
    return merge(tops, positions, bounds.max(axis=0), k)


def _by_maxima(vectors: Compressed, layout: CellLayout, mesh: Mesh) -> bool:
    """Return whether the kernel of `gpu_kernel.py` computes the products."""
    if layout.size % gpu_kernel.TILE_POSITIONS:
        return False
    return gpu_kernel.can_take(platform_of(mesh), layout.width, vectors.numbers.shape[-1], vectors.numbers.dtype)


def best_by_maxima(
    queries: Compressed, vectors: Compressed, cell: jax.Array, exists: jax.Array, count: int, platform: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search one cell without holding its scores in memory.

    The best positions are in the groups with the highest maxima; only the products of these groups are computed again.

    Args:
        queries: query vectors [Q,D].
        vectors: vectors of all cells [cells,n,D].
        cell: index of the cell.
        exists: whether a position has a row [n].
        count: positions to return.
        platform: the result of `platform_of`.

    Returns:
        The `count` best scores [Q,count], descending; their positions [Q,count]; an upper bound of the others [Q].
    """
    mask = jnp.where(exists, 0.0, -jnp.inf)
    maxima = gpu_kernel.group_maxima(queries, vectors, cell, mask, interpret=platform == "cpu")
    _, groups, bound = best(maxima, min(count, maxima.shape[1]))
    scores, positions = gpu_kernel.best_of_groups(queries, vectors, cell, mask, groups)
    top, columns = highest(scores, count)
    # The bound covers the scores of the other groups, and the last score those that are left out of these groups.
    if count < len(exists):
        bound = jnp.maximum(bound, top[:, -1])
    return top, jnp.take_along_axis(positions, columns, axis=1), bound
