"""Search lists of vectors on a device with one program: a tile of passages is multiplied with all query vectors, and
only the maxima of its products are kept. Used by `multi_vector.py`."""

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

TILE = (
    2**21
)  # numbers and products of a tile on a CPU: 8 MiB, which stay in its cache; other devices take a block at once


class PaddedLists(NamedTuple):
    """Lists of vectors [N,V,D] float32, padded, with a mask [N,V]. Lists after the first `real` are empty. N is a power
    of two."""

    vectors: np.ndarray
    mask: np.ndarray
    real: int


@dataclass(frozen=True)
class DeviceVectorLists:
    """Passages on a device. vectors: numbers [N,V,D] of the precision, the other arrays [N,V]; mask [N,V]; real:
    passages that exist."""

    vectors: Compressed
    mask: jax.Array
    real: int
    precision: Precision

    def __call__(self, queries: Ragged, k: int) -> BlockHits:
        """Return the k passages with the highest scores of queries, which are lists of float32 vectors."""
        count, k, (size, length) = len(queries), min(k, self.real), self.mask.shape
        width, several = power_of_two(len(queries.flat)), power_of_two(count)  # few sizes, so few programs are compiled
        vectors = np.zeros((width, queries.flat.shape[1]), np.float32)
        vectors[: len(queries.flat)] = queries.flat
        owner = np.full(width, several, np.int32)
        owner[: len(queries.flat)] = np.repeat(np.arange(count), queries.lengths)
        numbers = compress(vectors, self.precision)
        at_once = passages_at_once(size, length * (width + vectors.shape[1]), jax.default_backend())
        computed_k = min(power_of_two(k), size)
        best_hits = search_lists(numbers, owner, self.vectors, self.mask, several, computed_k, at_once)
        scores, places = (np.asarray(x)[:count] for x in best_hits)
        bound = scores[:, k - 1] if k < self.real else np.full(count, -np.inf, np.float32)
        # Padded passages score -inf and come last: no product of vectors that passed `upper_norms` overflows.
        assert (places[:, :k] < self.real).all()
        return BlockHits(scores[:, :k], places[:, :k].astype(np.int64), bound)


def put_lists_on_device(block: PaddedLists, precision: Precision) -> DeviceVectorLists:
    shape = block.vectors.shape
    flat = compress(block.vectors.reshape(-1, shape[2]), precision)
    vectors = jax.tree.map(lambda x: jnp.asarray(x.reshape(*shape[:2], *x.shape[1:])), flat)
    return DeviceVectorLists(vectors, jnp.asarray(block.mask), block.real, precision)


def passages_at_once(size: int, numbers: int, platform: str) -> int:
    """Return the passages of a tile: a power of two that divides `size`. numbers: of one passage, and its products with
    all query vectors."""
    most = size if platform != "cpu" else max(1, TILE // numbers)
    return min(size, power_of_two(most + 1) // 2)


@partial(jax.jit, static_argnums=(4, 5, 6))
def search_lists(
    queries: Compressed,
    owner: jax.Array | np.ndarray,
    vectors: Compressed,
    mask: jax.Array,
    count: int,
    k: int,
    at_once: int,
) -> tuple[jax.Array, jax.Array]:
    """Return scores and positions [count,k] of the k best passages, descending. A score is sum_u max_v of
    `upper_bounds`: at least the exact one.

    Passages are the rows of a product and query vectors its columns, so that a maximum goes over whole rows.

    Args:
        queries: vectors [W,D] of all queries.
        owner: [W], the query of each vector; `count` for padding.
        vectors: of the passages.
        mask: [N,V], which vectors exist.
        count: queries.
        k: passages to return for each query.
        at_once: passages of a tile.
    """
    size, length = mask.shape
    exists = jnp.less(owner, count)

    def tile(passages: tuple[Compressed, jax.Array]) -> jax.Array:
        part, mask_of_tile = passages
        products = upper_bounds(part, queries, exists)  # [passages * V, W]: a bound has no order of its two sides
        products = jnp.where(mask_of_tile[:, None], products, -jnp.inf)
        best = products.reshape(at_once, length, -1).max(axis=1)
        return jnp.where(exists, best, 0.0)

    def tiled(x: jax.Array) -> jax.Array:
        return x.reshape(-1, at_once * length, *x.shape[2:])

    best = jax.lax.map(tile, (jax.tree.map(tiled, vectors), tiled(mask))).reshape(size, -1)  # [N,W]
    scores = jax.ops.segment_sum(best.T, owner, count + 1)[:count]
    top, places = jax.lax.top_k(scores, k)
    return top, places
