"""Search a corpus on the devices of this machine with one program: queries go in, k results come out.

Rows are dealt out to cells, row r to cell r % C, and each device holds as many cells. So the best rows of a query are
spread evenly over all cells, wherever they are in the corpus, and a cell returns little more than its share of k. The
scores that a cell leaves out are covered by the bound that the proof (`proof.py`) needs: a share that was too small
costs a query a second search, never a result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.search.backends import cpu, gpu_kernel
from jaxret.search.backends.precision import Compressed, Precision, compress
from jaxret.search.backends.top_k import best, best_of_cell, highest, merge, power_of_two, rounded_size, share
from jaxret.search.proof import BlockHits

CELL = 32_768  # vectors of a cell at most: its scores of 1,024 queries are 128 MiB
# On a TPU 16 MiB, which XLA keeps in the memory on the chip until it has the best of them: only vectors are read from
# the chip's main memory, which larger scores pass six times (docs/scale.md).
TPU_CELL = 4_096
# On a GPU whose products give maxima alone (`gpu_kernel.py`), these are 512 MiB.
MAXIMA_CELL = 2**20
MAXIMA_NUMBERS = 2**30  # of a cell, which may have to be copied
CHUNK_BYTES = 2**26  # of float32 vectors that are on their way to the devices at a time
ROW_AXIS = "rows"  # the axis of the mesh


class CellLayout(NamedTuple):
    """Positions of rows in cells: row r has position r // cells of cell r % cells.

    size: positions of a cell; some of the last may be empty. width: vectors of a row.
    """

    cells: int
    size: int
    width: int

    def chunk(self, dimension: int) -> int:
        """Return how many positions of every cell are filled at a time; it divides `size`."""
        places = self.size
        while places % 2 == 0 and places * self.cells * self.width * dimension * 4 > CHUNK_BYTES:
            places //= 2
        return places


def local_mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()), (ROW_AXIS,), axis_types=(AxisType.Auto,))


def platform_of(mesh: Mesh) -> str:
    """Return JAX's name of the platform; "cuda" for an NVIDIA GPU for which Triton compiles, Ampere or later."""
    device = mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; of AMD's "gfx90a"
    return "cuda" if re.fullmatch(r"([89]|\d\d+)\.\d+", capability) else str(device.platform)


def plan_cells(rows: int, shape: tuple[int, int], precision: Precision, devices: int, platform: str) -> CellLayout:
    """Return a layout of rows in cells.

    Args:
        shape: (vectors of a row, numbers of a vector).
        precision: of the numbers.
        devices: number of devices.
        platform: as `platform_of` returns it.
    """
    width, cell, multiple, steps = shape[0], TPU_CELL if platform == "tpu" else CELL, 1, 16
    if gpu_kernel.can_take(platform, *shape, precision.dtype):  # cells are few and large: a sixteenth of one is much
        cell, multiple, steps = min(MAXIMA_CELL, MAXIMA_NUMBERS // shape[1]), gpu_kernel.PLACES, 128
    cells = devices * math.ceil(rows * width / (devices * cell))
    size = rounded_size(math.ceil(rows / cells), steps)
    return CellLayout(cells, -(-size // multiple) * multiple, width)


@dataclass(frozen=True)
class DeviceVectors:
    """Rows on the devices of a mesh, the first `rows` positions of a layout.

    vectors: numbers [cells, size * width, D], the other arrays [cells, size * width], split by cells.
    """

    mesh: Mesh
    layout: CellLayout
    rows: int
    precision: Precision
    vectors: Compressed

    def __call__(self, queries: np.ndarray, k: int) -> BlockHits:
        """Return the k rows with the highest scores of queries [Q,D] float32."""
        count, k = len(queries), min(k, self.rows)
        by_maxima = _by_maxima(self.vectors, self.layout, self.mesh)
        size = gpu_kernel.whole_tiles(count) if by_maxima else power_of_two(count)
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
        chunks: [positions * cells, width, D] float32, `layout.chunk` positions each; the last may be shorter.
        layout: where rows lie.
        precision: of the numbers on the devices.
    """
    where = NamedSharding(mesh, P(ROW_AXIS))
    vectors, rows = None, 0
    for chunk in chunks:
        dimension = chunk.shape[-1]
        places = layout.chunk(dimension)
        whole = np.pad(chunk, ((0, places * layout.cells - len(chunk)), (0, 0), (0, 0)))
        some = compress(whole.reshape(-1, dimension), precision)
        cells = jax.device_put(jax.tree.map(partial(_deal, layout=layout, places=places), some), where)
        if places == layout.size:
            vectors = cells
        else:
            vectors = _empty(cells, layout, where) if vectors is None else vectors
            vectors = _fill(vectors, cells, rows // layout.cells * layout.width)
        rows += len(chunk)
    assert vectors is not None, "there are no rows"
    return DeviceVectors(mesh, layout, rows, precision, vectors)


def _deal(x: np.ndarray, layout: CellLayout, places: int) -> np.ndarray:
    """Return [places * cells * width, ...] as [cells, places * width, ...]."""
    by_place = x.reshape(places, layout.cells, layout.width, *x.shape[1:])
    return np.ascontiguousarray(by_place.swapaxes(0, 1)).reshape(layout.cells, places * layout.width, *x.shape[1:])


def _empty(like: Compressed, layout: CellLayout, where: NamedSharding) -> Compressed:
    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((layout.cells, layout.size * layout.width, *x.shape[2:]), x.dtype, device=where)

    return jax.tree.map(zeros, like)


@partial(jax.jit, donate_argnums=0)
def _fill(vectors: Compressed, chunk: Compressed, start: jax.Array | int) -> Compressed:
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1), vectors, chunk)


@partial(jax.jit, static_argnums=(3, 4, 5))
def search_cells(
    queries: Compressed, vectors: Compressed, rows: jax.Array | int, layout: CellLayout, k: int, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return scores and rows [Q,k] of the k best of the first `rows` rows, descending, and an upper bound on the score
    of every other row [Q].

    Each device goes through its cells, one product after another, and returns its share of the k best; nothing else
    travels between devices. Where there are fewer than k rows, others with score -inf are added.

    Args:
        queries: [Q,D].
        vectors: of all cells.
        layout: where rows lie.
        k: rows to return for each query.
    """
    by_maxima = _by_maxima(vectors, layout, mesh)
    per_cell = share(k, layout.cells, layout.size)
    per_device = min(k, share(k, mesh.size, layout.cells // mesh.size * layout.size))

    def device(
        queries: Compressed, rows: jax.Array, cells: jax.Array, vectors: Compressed
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def one(cell: tuple[jax.Array, Compressed]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number, cell_vectors = cell
            rows_of_cell = jnp.arange(layout.size) * layout.cells + number
            top, places, bound = best_of_cell(queries, cell_vectors, rows_of_cell < rows, per_cell)
            return top, rows_of_cell[places], bound

        def one_by_maxima(cell: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number, index = cell
            rows_of_cell = jnp.arange(layout.size) * layout.cells + number
            top, places, bound = best_by_maxima(
                queries, vectors, index, rows_of_cell < rows, per_cell, platform_of(mesh)
            )
            return top, rows_of_cell[places], bound

        if by_maxima:
            several = jax.lax.map(one_by_maxima, (cells, jnp.arange(len(cells))))
        else:
            several = jax.lax.map(one, (cells, vectors))
        tops, cell_rows, bounds = several  # [cells of the device, Q, ...]
        return jax.tree.map(lambda x: x[None], merge(tops, cell_rows, bounds.max(axis=0), per_device))

    specs = (P(), P(), P(ROW_AXIS), P(ROW_AXIS))
    # A kernel does not say over which devices its results vary.
    sharded_search = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P(ROW_AXIS), check_vma=not by_maxima)
    per_device_hits = sharded_search(queries, jnp.asarray(rows), jnp.arange(layout.cells), vectors)
    tops, places, bounds = jax.lax.with_sharding_constraint(per_device_hits, NamedSharding(mesh, P()))
    return merge(tops, places, bounds.max(axis=0), k)


def _by_maxima(vectors: Compressed, layout: CellLayout, mesh: Mesh) -> bool:
    """Return whether the kernel of `gpu_kernel.py` multiplies."""
    numbers = vectors.numbers
    whole = layout.size % gpu_kernel.PLACES == 0
    return whole and gpu_kernel.can_take(platform_of(mesh), layout.width, numbers.shape[-1], numbers.dtype)


def best_by_maxima(
    queries: Compressed, vectors: Compressed, cell: jax.Array, exists: jax.Array, count: int, platform: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the `count` best scores of a cell and their positions [Q,count], and an upper bound on all others [Q],
    without the scores in memory.

    The best positions are in the groups with the highest maxima; only these are multiplied again.

    Args:
        queries: [Q,D].
        vectors: of all cells [cells,n,D].
        exists: [n], whether a position has a row.
        count: positions to return.
        platform: as `platform_of` returns it.
    """
    mask = jnp.where(exists, 0.0, -jnp.inf)
    maxima = gpu_kernel.group_maxima(queries, vectors, cell, mask, interpret=platform == "cpu")
    _, groups, bound = best(maxima, min(count, maxima.shape[1]))
    scores, places = gpu_kernel.best_of_groups(queries, vectors, cell, mask, groups)
    top, columns = highest(scores, count)
    if count < len(exists):  # no score of other groups is above the bound, none of what is left of these above the last
        bound = jnp.maximum(bound, top[:, -1])
    return top, jnp.take_along_axis(places, columns, axis=1), bound
