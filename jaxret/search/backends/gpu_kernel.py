"""On a GPU: maxima of groups of scores, computed inside the product, so that the scores are never in memory.

XLA's own program writes the scores of a cell and reads them again, and copies the cell's vectors before: two and a half
times the bytes of the product alone (docs/scale.md). This kernel writes an eighth of the scores, once. The groups with
the highest maxima hold the best rows; only their k * GROUP_PLACES rows are multiplied again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxret.search.backends.precision import Compressed
from jaxret.search.backends.top_k import power_of_two

GROUP_PLACES = 8  # places of a group: `PLACES // GROUP_PLACES` apart, so that a thread has all of them
QUERIES, PLACES, NUMBERS = 128, 128, 64  # of a tile: its products are 64 KiB of registers
LEAST_QUERIES = 16  # queries of a product on tensor cores
# Pallas has Triton count in 32 bits up to here, and Triton takes these as signed: numbers of int8 after 2**31 are lost.
IN_32_BITS = 2**32


def can_take(platform: str, width: int, dimension: int, dtype: Any) -> bool:
    """Return whether the kernel supports these vectors: tensor cores have no float32.

    Args:
        platform: as `accelerators.platform_of` returns it.
        width: vectors of a row.
        dimension: numbers of a vector.
        dtype: of the numbers.
    """
    return platform == "cuda" and width == 1 and dimension % NUMBERS == 0 and dtype != jnp.float32


def whole_tiles(count: int) -> int:
    """Return the number of queries, padded to tiles of LEAST_QUERIES or QUERIES, which the self-check covers."""
    return LEAST_QUERIES if count <= LEAST_QUERIES else max(QUERIES, power_of_two(count))


def group_maxima(
    queries: Compressed, vectors: Compressed, cell: jax.Array, mask: jax.Array, interpret: bool = False
) -> jax.Array:
    """Return an upper bound on the products of each group of a cell with queries, float32 [Q, n // GROUP_PLACES].

    Args:
        queries: [Q,D]; Q comes from `whole_tiles`.
        vectors: of all cells [cells,n,D].
        mask: [n]: 0 where a position has a vector, else -inf.
        interpret: run without a GPU.
    """
    from jax.experimental import pallas as pl  # a start without a GPU does without: it takes a tenth of a second
    from jax.experimental.pallas import triton as pltriton

    (count, dimension), size = queries.numbers.shape, vectors.numbers.shape[1]
    if vectors.numbers.size > IN_32_BITS // 2 and _bytes(vectors.numbers) <= IN_32_BITS:
        vectors = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, cell, 1), vectors)  # a copy
        cell = jnp.zeros_like(cell)
    rows = min(QUERIES, count)

    def of_queries(x: jax.Array) -> pl.BlockSpec:
        shape = (rows, *x.shape[1:])
        return pl.BlockSpec(shape, lambda query, place: (query, *(0,) * (len(shape) - 1)))

    query_leaves, vector_leaves = (jax.tree.leaves(x) for x in (queries, vectors))
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    cost = {
        "flops": 2 * count * size * dimension,
        "bytes": sum(map(_bytes, [*query_leaves, mask])) + 4 * count * size // GROUP_PLACES,
    }
    cost["bytes"] += sum(_bytes(x) // len(x) for x in vector_leaves)  # of one cell
    call = pl.pallas_call(
        partial(_tile, jax.tree.structure(queries), dimension),
        grid=(count // rows, size // PLACES),  # the first runs fastest: places come from memory once, for all queries
        in_specs=[
            *map(of_queries, query_leaves),
            *[everywhere] * len(vector_leaves),
            pl.BlockSpec((PLACES,), lambda query, place: (place,)),
            everywhere,
        ],
        out_specs=pl.BlockSpec((rows, PLACES // GROUP_PLACES), lambda query, place: (query, place)),
        out_shape=jax.ShapeDtypeStruct((count, size // GROUP_PLACES), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=3),
        # A plan reads the kernel's FLOPs there (plan/hlo.py), because its call has no field for them.
        name="_".join(["group_maxima", *(f"{what}_{number}" for what, number in cost.items())]),
        interpret=interpret,
    )
    return call(*query_leaves, *vector_leaves, mask, cell[None])


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def _tile(tree: Any, dimension: int, *refs: Any) -> None:
    """Compute products of some queries with some positions of a cell, and their maxima."""
    from jax.experimental import pallas as pl

    leaves = tree.num_leaves
    queries, vectors = jax.tree.unflatten(tree, refs[:leaves]), jax.tree.unflatten(tree, refs[leaves : 2 * leaves])
    mask, cell, out = refs[2 * leaves :]
    number, places = cell[0], pl.ds(pl.program_id(1) * PLACES, PLACES)
    rows = out.shape[0]
    kind = jnp.int32 if queries.numbers.dtype == jnp.int8 else jnp.float32

    def add(step: jax.Array, products: jax.Array) -> jax.Array:
        some = pl.ds(step * NUMBERS, NUMBERS)
        ours, theirs = queries.numbers[:, some], vectors.numbers[number, places, some]
        return products + jax.lax.dot_general(ours, theirs, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    products = jax.lax.fori_loop(0, dimension // NUMBERS, add, jnp.zeros((rows, PLACES), kind))
    part = Compressed(
        *(None if x is None else x[number, places] for x in (None, vectors.scale, vectors.norm, vectors.error))
    )
    of_queries = Compressed(
        *(None if x is None else x[...] for x in (None, queries.scale, queries.norm, queries.error))
    )
    scores = at_most(products, of_queries, part, mask[...])
    out[...] = scores.reshape(rows, GROUP_PLACES, PLACES // GROUP_PLACES).max(axis=1)


def at_most(products: jax.Array, queries: Compressed, vectors: Compressed, mask: jax.Array) -> jax.Array:
    """Return upper bounds of exact products, float32.

    Args:
        products: [Q,n] as computed.
        queries: scale, norm and error [Q].
        vectors: scale, norm and error [n], or of each query [Q,n].
        mask: 0, or -inf where there is no vector.
    """
    scores = products.astype(jnp.float32)
    if queries.scale is not None:
        scores = scores * queries.scale[:, None] * vectors.scale
    return scores + mask + queries.norm[:, None] * vectors.error + queries.error[:, None] * vectors.norm


def best_of_groups(
    queries: Compressed, vectors: Compressed, cell: jax.Array, mask: jax.Array, groups: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return scores and positions in the cell [Q, k * GROUP_PLACES] of the members of groups.

    Args:
        queries: [Q,D].
        vectors: of all cells [cells,n,D].
        mask: [n]: 0 where a position has a vector, else -inf.
        groups: [Q,k] of `group_maxima`.
    """
    apart = PLACES // GROUP_PLACES
    first = groups // apart * PLACES + groups % apart
    places = (first[:, :, None] + apart * jnp.arange(GROUP_PLACES)).reshape(len(groups), -1)
    numbers = vectors.numbers[cell, places]  # [Q, k * GROUP_PLACES, D]; not in memory: it is multiplied as it is read
    kind = jnp.int32 if numbers.dtype == jnp.int8 else jnp.float32
    products = (queries.numbers[:, None].astype(kind) * numbers.astype(kind)).sum(axis=-1)
    rest = (None if x is None else x[cell, places] for x in (vectors.scale, vectors.norm, vectors.error))
    return at_most(products, queries, Compressed(None, *rest), mask[places]), places
