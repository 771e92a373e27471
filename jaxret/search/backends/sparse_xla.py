"""Products of sparse vectors in one program that XLA compiles for all devices of this machine.

A query is dense on the devices, a passage is the list of its words: a product gathers the query's weights of these
words. Passages are split over the devices, queries are on each.
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

QUERIES = 128  # of a program: its table of weights by word takes 15 MiB for 30,522 words
PRODUCTS = 2**22  # float32 numbers of a tile of passages, where a device keeps them: 16 MiB


@dataclass(frozen=True)
class XlaLists:
    """Lists of words on the devices of JAX. Products are summed in float32."""

    reason: str

    @property
    def description(self) -> str:
        devices = jax.local_devices()
        where = f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
        return f"lists of words, XLA (jax {jax.__version__}) on {where} ({self.reason})"

    def load(self, block: SparseRows) -> XlaBlock:
        mesh, counts = local_mesh(), block.word_counts
        width, rows = rounded_size(max(1, int(counts.max()))), mesh.size * rounded_size(-(-len(block) // mesh.size))
        words, weights = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
        places = (
            np.repeat(np.arange(len(block)), counts),
            np.arange(len(block.words)) - np.repeat(block.offsets[:-1], counts),
        )
        words[places], weights[places] = block.words, normal(block.weights)
        where = NamedSharding(mesh, P(ROW_AXIS))
        return XlaBlock(mesh, len(block), jax.device_put(words, where), jax.device_put(weights, where))


@dataclass(frozen=True)
class XlaBlock:
    """Passages on the devices of a mesh, the first `rows`: words [n,W] int32 and their weights float32, 0 where a
    passage has fewer."""

    mesh: Mesh
    rows: int
    words: jax.Array
    weights: jax.Array

    def __call__(self, queries: SparseRows, k: int) -> BlockHits:
        """Return the k passages with the highest products above 0 of each query; absent ones score -inf."""
        k = min(k, self.rows)
        parts = [
            self._search(queries.part(start, min(start + QUERIES, len(queries))), k)
            for start in range(0, len(queries), QUERIES)
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
        return BlockHits(scores[:, :k], rows[:, :k].astype(np.int64), bound)


def normal(weights: np.ndarray) -> np.ndarray:
    """Return weights above 0 as normal float32 numbers, which no device takes for 0; `rounding_error` allows for it."""
    return np.maximum(np.asarray(weights, np.float32), np.float32(TINY))


@partial(jax.jit, static_argnames=("k", "mesh"))
def search_sparse(
    table: jax.Array, words: jax.Array, weights: jax.Array, k: int, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the k highest scores [Q,k] of passages that share a word with a query, their rows, and an upper bound of
    the other scores [Q].

    Args:
        table: weights of the queries' words, [D,Q].
        words: of the passages, [n,W].
        weights: of these words, [n,W].
        k: passages of a query.
        mesh: the devices, which have n / devices passages each.
    """

    def on_device(table: jax.Array, words: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        scores = products_of(table, words, weights)
        top, places, bound = best(scores, min(k, scores.shape[1]))
        rows = places + jax.lax.axis_index(ROW_AXIS) * scores.shape[1]
        return top[None], rows[None], bound[None]

    split = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(), P(ROW_AXIS), P(ROW_AXIS)),
        out_specs=(P(ROW_AXIS), P(ROW_AXIS), P(ROW_AXIS)),
    )
    tops, rows, bounds = split(table, words, weights)
    return merge(tops, rows, bounds.max(axis=0), k)


def products_of(table: jax.Array, words: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the scores [Q,n] of passages; -inf where a passage has no word of the query."""
    n, width = words.shape
    tiles = power_of_two(-(-n * width * table.shape[1] // PRODUCTS))
    rows = -(-n // tiles)
    spare = ((0, rows * tiles - n), (0, 0))

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        words, weights = tile
        weight = weights[..., None]
        query_weights = table[words]  # [rows,W,Q]
        # A word of both texts counts, however small the product is.
        products = jnp.where((query_weights > 0) & (weight > 0), jnp.maximum(query_weights * weight, TINY), 0.0)
        return products.sum(axis=1)

    tile_arrays = tuple(jnp.pad(x, spare).reshape(tiles, rows, width) for x in (words, weights))
    scores = jax.lax.map(of_tile, tile_arrays).reshape(rows * tiles, -1)[:n].T
    return jnp.where(scores > 0, scores, -jnp.inf)
