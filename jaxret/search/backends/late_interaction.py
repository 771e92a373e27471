"""Search lists of vectors on a device with one compiled program, for `multi_vector.py`.

It multiplies a tile of passages with all query vectors, and keeps only the maxima of the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.search.backends.precision import Compressed, Precision, compress
from jaxret.search.backends.top_k import power_of_two, upper_bounds
from jaxret.search.proof import BlockHits
from jaxret.types import Ragged

# Values of the vectors and products of a tile on a CPU: 8 MiB, which fit in its cache. On other devices a tile is the
# whole block.
TILE_VALUES = 2**21


class PaddedLists(NamedTuple):
    """Lists of vectors, padded to V vectors each and to N lists, a power of two."""

    vectors: np.ndarray  # [N,V,D] float32
    mask: np.ndarray  # [N,V], whether a vector exists
    real: int  # number of lists; the others are padding


@dataclass(frozen=True)
class DeviceVectorLists:
    """Passages with several vectors on a device."""

    vectors: Compressed  # numbers [N,V,D], other arrays [N,V]
    mask: jax.Array  # [N,V], whether a vector exists
    real: int  # number of passages; the others are padding
    precision: Precision

    def __call__(self, queries: Ragged, k: int) -> BlockHits:
        """Return the k passages with the highest scores for each query, a list of float32 vectors."""
        count, k, (size, length) = len(queries), min(k, self.real), self.mask.shape
        # Powers of two: few sizes, so few programs are compiled.
        width, padded_count = power_of_two(len(queries.flat)), power_of_two(count)
        vectors = np.zeros((width, queries.flat.shape[1]), np.float32)
        vectors[: len(queries.flat)] = queries.flat
        owner = np.full(width, padded_count, np.int32)
        owner[: len(queries.flat)] = np.repeat(np.arange(count), queries.lengths)
        query_arrays = compress(vectors, self.precision)
        tile_size = passages_of_tile(size, length * (width + vectors.shape[1]), jax.default_backend())
        computed_k = min(power_of_two(k), size)
        best_hits = search_lists(query_arrays, owner, self.vectors, self.mask, padded_count, computed_k, tile_size)
        scores, positions = (np.asarray(x)[:count] for x in best_hits)
        bound = scores[:, k - 1] if k < self.real else np.full(count, -np.inf, np.float32)
        # Padding has the score -inf and comes last, because products of vectors that passed `upper_norms` never
        # overflow.
        assert (positions[:, :k] < self.real).all()
        return BlockHits(scores[:, :k], positions[:, :k].astype(np.int64), bound)


def put_lists_on_device(block: PaddedLists, precision: Precision) -> DeviceVectorLists:
    """Copy a block to JAX's default device, with its vectors rounded to a precision."""
    shape = block.vectors.shape
    flat = compress(block.vectors.reshape(-1, shape[2]), precision)
    vectors = jax.tree.map(lambda x: jnp.asarray(x.reshape(*shape[:2], *x.shape[1:])), flat)
    return DeviceVectorLists(vectors, jnp.asarray(block.mask), block.real, precision)


def passages_of_tile(size: int, values: int, platform: str) -> int:
    """Return the number of passages of a tile, a power of two that divides `size`.

    `values` is the number of values of one passage: its vectors, and its products with all query vectors.
    """
    limit = size if platform != "cpu" else max(1, TILE_VALUES // values)
    return min(size, power_of_two(limit + 1) // 2)


@partial(jax.jit, static_argnums=(4, 5, 6))
def search_lists(
    queries: Compressed,
    owner: jax.Array | np.ndarray,
    vectors: Compressed,
    mask: jax.Array,
    count: int,
    k: int,
    tile_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return scores and positions [count,k] of the k best passages, descending.

    A score is sum_u max_v of `upper_bounds`, and is never below the exact score. Passages are the rows of a product and
    query vectors its columns, so that a maximum is taken of contiguous rows.

    Args:
        queries: vectors [W,D] of all queries.
        owner: the query of each vector [W]; `count` for padding.
        vectors: vectors of the passages.
        mask: whether a vector exists [N,V].
        count: number of queries.
        k: passages to return for each query.
        tile_size: passages of a tile.
    """
    size, length = mask.shape
    exists = jnp.less(owner, count)

    def tile(passages: tuple[Compressed, jax.Array]) -> jax.Array:
        part, mask_of_tile = passages
        products = upper_bounds(part, queries, exists)  # [passages * V, W]; the bound is symmetric in its arguments
        products = jnp.where(mask_of_tile[:, None], products, -jnp.inf)
        best = products.reshape(tile_size, length, -1).max(axis=1)
        return jnp.where(exists, best, 0.0)

    def split_into_tiles(x: jax.Array) -> jax.Array:
        return x.reshape(-1, tile_size * length, *x.shape[2:])

    tiles = jax.tree.map(split_into_tiles, (vectors, mask))
    best = jax.lax.map(tile, tiles).reshape(size, -1)  # [N,W]
    scores = jax.ops.segment_sum(best.T, owner, count + 1)[:count]
    top, positions = jax.lax.top_k(scores, k)
    return top, positions
