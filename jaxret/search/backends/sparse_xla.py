"""Products of sparse vectors in one program that XLA compiles for all devices of this machine.

On the devices, a query is a dense vector, and a passage is the list of its words. A product gathers the query's weights
of these words. The passages are divided among the devices; each device has all queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.search.backends.accelerators import ROW_AXIS, local_mesh
from jaxret.search.backends.top_k import best, merge, power_of_two, rounded_size
from jaxret.search.proof import BlockHits
from jaxret.search.rounding import TINY
from jaxret.types import SparseRows

QUERIES_AT_ONCE = 128  # a table of their weights takes 15 MiB for 30,522 words
TILE_PRODUCTS = 2**22  # float32 products of a tile of passages: 16 MiB, in case a device stores them


@dataclass(frozen=True)
class XlaLists:
    """The backend that searches lists of words on the devices of JAX. Products are summed in float32."""

    reason: str

    @property
    def description(self) -> str:
        devices = jax.local_devices()
        device_names = f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
        return f"lists of words, XLA (jax {jax.__version__}) on {device_names} ({self.reason})"

    def load(self, block: SparseRows) -> XlaBlock:
        mesh, counts = local_mesh(), block.word_counts
        width, rows = rounded_size(max(1, int(counts.max()))), mesh.size * rounded_size(-(-len(block) // mesh.size))
        words, weights = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
        positions = (
            np.repeat(np.arange(len(block)), counts),
            np.arange(len(block.words)) - np.repeat(block.offsets[:-1], counts),
        )
        words[positions], weights[positions] = block.words, normal(block.weights)
        sharding = NamedSharding(mesh, P(ROW_AXIS))
        return XlaBlock(mesh, len(block), jax.device_put(words, sharding), jax.device_put(weights, sharding))


@dataclass(frozen=True)
class XlaBlock:
    """Passages on the devices of a mesh."""

    mesh: Mesh
    rows: int  # number of passages; rows of the arrays after them are padding
    words: jax.Array  # [n,W] int32
    weights: jax.Array  # [n,W] float32, 0 for padding

    def __call__(self, queries: SparseRows, k: int) -> BlockHits:
        """Return the k passages with the highest products above 0 of each query, padded with rows of score -inf."""
        k = min(k, self.rows)
        parts = [
            self._search(queries.part(start, min(start + QUERIES_AT_ONCE, len(queries))), k)
            for start in range(0, len(queries), QUERIES_AT_ONCE)
        ]
        return BlockHits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _search(self, queries: SparseRows, k: int) -> BlockHits:
        table = np.zeros((queries.dimension, power_of_two(len(queries))), np.float32)
        table[queries.words, np.repeat(np.arange(len(queries)), queries.word_counts)] = normal(queries.weights)
        computed_k = min(rounded_size(k), self.rows)
        arrays = search_sparse(table, self.words, self.weights, computed_k, self.mesh)
        scores, rows, bound = (np.asarray(x)[: len(queries)] for x in arrays)
        if k < computed_k:
            bound = np.maximum(bound, scores[:, k])
        if k == self.rows:  # only padding is left out
            bound = np.full_like(bound, -np.inf)
        return BlockHits(scores[:, :k], rows[:, :k].astype(np.int64), bound)


def normal(weights: np.ndarray) -> np.ndarray:
    """Return weights above 0 as normal float32 numbers, so that no device takes them for 0.

    `rounding_error` covers the change.
    """
    return np.maximum(np.asarray(weights, np.float32), np.float32(TINY))


@partial(jax.jit, static_argnames=("k", "mesh"))
def search_sparse(
    table: jax.Array, words: jax.Array, weights: jax.Array, k: int, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the k highest scores of passages that share a word with a query [Q,k], their rows [Q,k], and an upper
    bound of the other scores [Q].

    Args:
        table: weights of the queries' words [D,Q].
        words: words of the passages [n,W].
        weights: weights of these words [n,W].
        k: passages to return for each query.
        mesh: the devices, each with n / devices passages.
    """

    def search_part(table: jax.Array, words: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        scores = products_of(table, words, weights)
        top, positions, bound = best(scores, min(k, scores.shape[1]))
        rows = positions + jax.lax.axis_index(ROW_AXIS) * scores.shape[1]
        return top[None], rows[None], bound[None]

    split = jax.shard_map(
        search_part,
        mesh=mesh,
        in_specs=(P(), P(ROW_AXIS), P(ROW_AXIS)),
        out_specs=(P(ROW_AXIS), P(ROW_AXIS), P(ROW_AXIS)),
    )
    tops, rows, bounds = split(table, words, weights)
    return merge(tops, rows, bounds.max(axis=0), k)


def products_of(table: jax.Array, words: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the scores of passages [Q,n]; -inf if a passage has no word of the query."""
    n, width = words.shape
    tiles = power_of_two(-(-n * width * table.shape[1] // TILE_PRODUCTS))
    rows = -(-n // tiles)
    spare = ((0, rows * tiles - n), (0, 0))

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        words, weights = tile
        weight = weights[..., None]
        query_weights = table[words]  # [rows,W,Q]
        # A common word must give a score above 0, also if the product underflows.
        products = jnp.where((query_weights > 0) & (weight > 0), jnp.maximum(query_weights * weight, TINY), 0.0)
        return products.sum(axis=1)

    tile_arrays = tuple(jnp.pad(x, spare).reshape(tiles, rows, width) for x in (words, weights))
    scores = jax.lax.map(of_tile, tile_arrays).reshape(rows * tiles, -1)[:n].T
    return jnp.where(scores > 0, scores, -jnp.inf)
