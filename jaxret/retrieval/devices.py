"""A corpus on the devices of this machine, searched by one program: queries go in, k results come out.

Rows are dealt out to cells, row r to cell r % C, and each device holds as many cells: so the best rows of a query,
wherever the corpus has them, lie in all cells alike, and each needs to give back few more than its share. What a cell
leaves out is in the bound that the proof (`proof.py`) asks for: a share that was too small costs a query a second look,
never a result.
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

from jaxret.retrieval import host, maxima
from jaxret.retrieval.best import best, best_of_cell, few_sizes, highest, merge, power_of_two, share
from jaxret.retrieval.precision import Compressed, Precision, compress
from jaxret.retrieval.proof import Found

CELL = 32_768  # vectors of a cell at most: its scores of 1,024 queries are 128 MiB
# On a TPU 16 MiB, which XLA keeps in the memory on the chip until it has the best of them: only vectors are read from
# the chip's main memory, which larger scores pass six times (docs/scale.md).
TPU_CELL = 4_096
# On a GPU whose products give maxima alone (`maxima.py`), these are 512 MiB.
MAXIMA_CELL = 2**20
MAXIMA_NUMBERS = 2**30  # of a cell, which may have to be copied
CHUNK_BYTES = 2**26  # of float32 vectors that are on their way to the devices at a time
ROWS = "rows"  # the axis of the mesh


class Layout(NamedTuple):
    """Where rows lie: row r is place r // cells of cell r % cells. size: places of a cell, of which some of the last
    may be empty. width: vectors of a row."""

    cells: int
    size: int
    width: int

    def chunk(self, dimension: int) -> int:
        """Places of every cell that are filled at a time; divides `size`."""
        places = self.size
        while places % 2 == 0 and places * self.cells * self.width * dimension * 4 > CHUNK_BYTES:
            places //= 2
        return places


def local_mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()), (ROWS,), axis_types=(AxisType.Auto,))


def platform_of(mesh: Mesh) -> str:
    """JAX's name; "cuda" of an NVIDIA GPU for which Triton compiles, Ampere or later."""
    device = mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; of AMD's "gfx90a"
    return "cuda" if re.fullmatch(r"([89]|\d\d+)\.\d+", capability) else str(device.platform)


def lay_out(rows: int, shape: tuple[int, int], precision: Precision, devices: int, platform: str) -> Layout:
    """shape: (vectors of a row, numbers of a vector)."""
    width, cell, multiple, steps = shape[0], TPU_CELL if platform == "tpu" else CELL, 1, 16
    if maxima.can_take(platform, *shape, precision.dtype):  # cells are few and large: a sixteenth of one is much
        cell, multiple, steps = min(MAXIMA_CELL, MAXIMA_NUMBERS // shape[1]), maxima.PLACES, 128
    cells = devices * math.ceil(rows * width / (devices * cell))
    size = few_sizes(math.ceil(rows / cells), steps)
    return Layout(cells, -(-size // multiple) * multiple, width)


@dataclass(frozen=True)
class Held:
    """Rows on the devices of a mesh, the first `rows` places of a layout. vectors: numbers [cells, size * width, D],
    the rest [cells, size * width], split by cells."""

    mesh: Mesh
    layout: Layout
    rows: int
    precision: Precision
    vectors: Compressed

    def __call__(self, queries: np.ndarray, k: int) -> Found:
        """The k rows with the highest scores of queries [Q,D] float32."""
        count, k = len(queries), min(k, self.rows)
        by_maxima = _by_maxima(self.vectors, self.layout, self.mesh)
        size = maxima.whole_tiles(count) if by_maxima else power_of_two(count)
        padded = np.pad(queries, ((0, size - count), (0, 0)))
        wanted = min(few_sizes(k), self.rows)
        asked = compress(padded, self.precision)
        if platform_of(self.mesh) == "cpu" and self.mesh.size == 1:
            found = host.search_cells(asked, self.vectors, self.rows, self.layout.size, wanted)
        else:
            found = search_cells(asked, self.vectors, self.rows, self.layout, wanted, self.mesh)
        scores, rows, bound = (np.asarray(x)[:count] for x in found)
        if k < wanted:
            bound = np.maximum(bound, scores[:, k])
        return Found(scores[:, :k], rows[:, :k].astype(np.int64), bound)


def hold(chunks: Iterable[np.ndarray], layout: Layout, precision: Precision, mesh: Mesh) -> Held:
    """Puts rows on the devices. chunks: [places * cells, width, D] float32, `layout.chunk` places each; the last may be
    shorter."""
    where = NamedSharding(mesh, P(ROWS))
    vectors, rows = None, 0
    for chunk in chunks:
        dimension = chunk.shape[-1]
        places = layout.chunk(dimension)
        whole = np.pad(chunk, ((0, places * layout.cells - len(chunk)), (0, 0), (0, 0)))
        some = compress(whole.reshape(-1, dimension), precision)
        dealt = jax.device_put(jax.tree.map(partial(_deal, layout=layout, places=places), some), where)
        if places == layout.size:
            vectors = dealt
        else:
            vectors = _empty(dealt, layout, where) if vectors is None else vectors
            vectors = _fill(vectors, dealt, rows // layout.cells * layout.width)
        rows += len(chunk)
    assert vectors is not None, "there are no rows"
    return Held(mesh, layout, rows, precision, vectors)


def _deal(x: np.ndarray, layout: Layout, places: int) -> np.ndarray:
    """[places * cells * width, ...] -> [cells, places * width, ...]."""
    by_place = x.reshape(places, layout.cells, layout.width, *x.shape[1:])
    return np.ascontiguousarray(by_place.swapaxes(0, 1)).reshape(layout.cells, places * layout.width, *x.shape[1:])


def _empty(like: Compressed, layout: Layout, where: NamedSharding) -> Compressed:
    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((layout.cells, layout.size * layout.width, *x.shape[2:]), x.dtype, device=where)

    return jax.tree.map(zeros, like)


@partial(jax.jit, donate_argnums=0)
def _fill(vectors: Compressed, chunk: Compressed, at: jax.Array | int) -> Compressed:
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, at, axis=1), vectors, chunk)


@partial(jax.jit, static_argnums=(3, 4, 5))
def search_cells(
    queries: Compressed, vectors: Compressed, rows: jax.Array | int, layout: Layout, k: int, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores and places [Q,k] of the k best of the first `rows` rows, descending, and what no other row's score is
    above [Q].

    Each device goes through its cells, one product after another, and gives back its share of the k best: these are all
    that travels. Where there are fewer than k, others fill up with -inf.
    """
    by_maxima = _by_maxima(vectors, layout, mesh)
    per_cell = share(k, layout.cells, layout.size)
    per_device = min(k, share(k, mesh.size, layout.cells // mesh.size * layout.size))

    def device(
        queries: Compressed, rows: jax.Array, cells: jax.Array, vectors: Compressed
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def one(cell: tuple[jax.Array, Compressed]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number, held = cell
            there = jnp.arange(layout.size) * layout.cells + number
            top, places, bound = best_of_cell(queries, held, there < rows, per_cell)
            return top, there[places], bound

        def one_by_maxima(cell: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number, index = cell
            there = jnp.arange(layout.size) * layout.cells + number
            top, places, bound = best_by_maxima(queries, vectors, index, there < rows, per_cell, platform_of(mesh))
            return top, there[places], bound

        if by_maxima:
            several = jax.lax.map(one_by_maxima, (cells, jnp.arange(len(cells))))
        else:
            several = jax.lax.map(one, (cells, vectors))
        tops, found, bounds = several  # [cells of the device, Q, ...]
        return jax.tree.map(lambda x: x[None], merge(tops, found, bounds.max(axis=0), per_device))

    specs = (P(), P(), P(ROWS), P(ROWS))
    # A kernel does not say over which devices its results vary.
    mapped = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P(ROWS), check_vma=not by_maxima)
    found = mapped(queries, jnp.asarray(rows), jnp.arange(layout.cells), vectors)
    tops, places, bounds = jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P()))
    return merge(tops, places, bounds.max(axis=0), k)


def _by_maxima(vectors: Compressed, layout: Layout, mesh: Mesh) -> bool:
    """Whether the kernel of `maxima.py` multiplies."""
    numbers = vectors.numbers
    whole = layout.size % maxima.PLACES == 0
    return whole and maxima.can_take(platform_of(mesh), layout.width, numbers.shape[-1], numbers.dtype)


def best_by_maxima(
    queries: Compressed, vectors: Compressed, cell: jax.Array, exists: jax.Array, count: int, platform: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `best` gives of the scores of a cell's vectors [cells,n,D], which are not in memory: the `count` best are in
    the groups with the highest maxima, and these are multiplied again."""
    there = jnp.where(exists, 0.0, -jnp.inf)
    found = maxima.group_maxima(queries, vectors, cell, there, interpret=platform == "cpu")
    _, groups, bound = best(found, min(count, found.shape[1]))
    scores, places = maxima.best_of_groups(queries, vectors, cell, there, groups)
    top, at = highest(scores, count)
    if count < len(exists):  # no score of other groups is above the bound, none of what is left of these above the last
        bound = jnp.maximum(bound, top[:, -1])
    return top, jnp.take_along_axis(places, at, axis=1), bound
