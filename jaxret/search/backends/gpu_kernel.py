"""A GPU kernel that computes products and writes only the maxima of groups of scores to memory.

XLA's own program copies the vectors of a cell, writes the scores and reads them again: two and a half times the bytes
of the product alone (docs/scale.md; tests/plan/watched_programs.py bounds them). This kernel writes one number for
eight scores. The groups with the highest maxima contain the best rows; only the products of their k * GROUP_POSITIONS
rows are computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxret.search.backends.precision import Compressed
from jaxret.search.backends.top_k import power_of_two

# Positions of a group. They are `TILE_POSITIONS // GROUP_POSITIONS` apart, so that one thread holds all of them.
GROUP_POSITIONS = 8
# Queries, positions and dimensions of a tile, whose products take 64 KiB of registers.
TILE_QUERIES, TILE_POSITIONS, TILE_DIMENSIONS = 128, 128, 64
LEAST_QUERIES = 16  # least number of queries in a product on tensor cores
# Up to this many bytes Pallas lets Triton use 32-bit offsets. Triton takes these as signed, so that int8 values after
# 2**31 would be lost.
IN_32_BITS = 2**32


def can_take(platform: str, width: int, dimension: int, dtype: Any) -> bool:
    """Return whether the kernel supports these vectors. float32 is not supported, because tensor cores lack it.

    Args:
        platform: the result of `accelerators.platform_of`.
        width: number of vectors per row.
        dimension: dimension of the vectors.
        dtype: dtype of the vectors.
    """
    return platform == "cuda" and width == 1 and dimension % TILE_DIMENSIONS == 0 and dtype != jnp.float32


def pad_to_tiles(count: int) -> int:
    """Return the number of queries, padded to LEAST_QUERIES or TILE_QUERIES (the self-check covers both) or more."""
    return LEAST_QUERIES if count <= LEAST_QUERIES else max(TILE_QUERIES, power_of_two(count))


def group_maxima(
    queries: Compressed, vectors: Compressed, cell: jax.Array, mask: jax.Array, interpret: bool = False
) -> jax.Array:
    """Return upper bounds of the products of queries with the groups of a cell, float32 [Q, n // GROUP_POSITIONS].

    Args:
        queries: query vectors [Q,D]; Q comes from `pad_to_tiles`.
        vectors: vectors of all cells [cells,n,D].
        cell: index of the cell.
        mask: 0 where a position has a vector, else -inf [n].
        interpret: whether to run without a GPU.
    """
    from jax.experimental import pallas as pl  # takes a tenth of a second, and is only needed on a GPU
    from jax.experimental.pallas import triton as pltriton

    (count, dimension), size = queries.numbers.shape, vectors.numbers.shape[1]
    if vectors.numbers.size > IN_32_BITS // 2 and _bytes(vectors.numbers) <= IN_32_BITS:
        vectors = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, cell, 1), vectors)  # copies the cell
        cell = jnp.zeros_like(cell)
    rows = min(TILE_QUERIES, count)

    def query_spec(x: jax.Array) -> pl.BlockSpec:
        shape = (rows, *x.shape[1:])
        return pl.BlockSpec(shape, lambda query, position: (query, *(0,) * (len(shape) - 1)))

    query_leaves, vector_leaves = (jax.tree.leaves(x) for x in (queries, vectors))
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    cost = {
        "flops": 2 * count * size * dimension,
        "bytes": sum(map(_bytes, [*query_leaves, mask])) + 4 * count * size // GROUP_POSITIONS,
    }
    cost["bytes"] += sum(_bytes(x) // len(x) for x in vector_leaves)  # the vectors of one cell
    call = pl.pallas_call(
        partial(_tile, jax.tree.structure(queries), dimension),
        # The first axis runs fastest, so that vectors are read from memory once for all queries.
        grid=(count // rows, size // TILE_POSITIONS),
        in_specs=[
            *map(query_spec, query_leaves),
            *[any_memory] * len(vector_leaves),
            pl.BlockSpec((TILE_POSITIONS,), lambda query, position: (position,)),
            any_memory,
        ],
        out_specs=pl.BlockSpec((rows, TILE_POSITIONS // GROUP_POSITIONS), lambda query, position: (query, position)),
        out_shape=jax.ShapeDtypeStruct((count, size // GROUP_POSITIONS), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=3),
        # `jaxret plan` reads the costs from the name (plan/hlo.py), because the call has no field for them.
        name="_".join(["group_maxima", *(f"{kind}_{number}" for kind, number in cost.items())]),
        interpret=interpret,
    )
    return call(*query_leaves, *vector_leaves, mask, cell[None])


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def _tile(tree: Any, dimension: int, *refs: Any) -> None:
    """Compute the products of a tile of queries and positions, and write the maxima of the groups."""
    from jax.experimental import pallas as pl

    leaves = tree.num_leaves
    queries, vectors = jax.tree.unflatten(tree, refs[:leaves]), jax.tree.unflatten(tree, refs[leaves : 2 * leaves])
    mask, cell, out = refs[2 * leaves :]
    number, positions = cell[0], pl.ds(pl.program_id(1) * TILE_POSITIONS, TILE_POSITIONS)
    rows = out.shape[0]
    kind = jnp.int32 if queries.numbers.dtype == jnp.int8 else jnp.float32

    def add(step: jax.Array, products: jax.Array) -> jax.Array:
        dimensions = pl.ds(step * TILE_DIMENSIONS, TILE_DIMENSIONS)
        left, right = queries.numbers[:, dimensions], vectors.numbers[number, positions, dimensions]
        return products + jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    products = jax.lax.fori_loop(0, dimension // TILE_DIMENSIONS, add, jnp.zeros((rows, TILE_POSITIONS), kind))
    part = Compressed(
        *(None if x is None else x[number, positions] for x in (None, vectors.scale, vectors.norm, vectors.error))
    )
    query_errors = Compressed(
        *(None if x is None else x[...] for x in (None, queries.scale, queries.norm, queries.error))
    )
    scores = bound_products(products, query_errors, part, mask[...])
    out[...] = scores.reshape(rows, GROUP_POSITIONS, TILE_POSITIONS // GROUP_POSITIONS).max(axis=1)


def bound_products(products: jax.Array, queries: Compressed, vectors: Compressed, mask: jax.Array) -> jax.Array:
    """Return upper bounds of exact products, float32 [Q,n].

    Args:
        products: the products of compressed vectors [Q,n].
        queries: scale, norm and error [Q].
        vectors: scale, norm and error [n], or [Q,n] if queries have different vectors.
        mask: 0 where a vector exists, else -inf.
    """
    scores = products.astype(jnp.float32)
    if queries.scale is not None:
        scores = scores * queries.scale[:, None] * vectors.scale
    return scores + mask + queries.norm[:, None] * vectors.error + queries.error[:, None] * vectors.norm


def best_of_groups(
    queries: Compressed, vectors: Compressed, cell: jax.Array, mask: jax.Array, groups: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the scores of all members of groups, and their positions in the cell, both [Q, k * GROUP_POSITIONS].

    Args:
        queries: query vectors [Q,D].
        vectors: vectors of all cells [cells,n,D].
        cell: index of the cell.
        mask: 0 where a position has a vector, else -inf [n].
        groups: columns of `group_maxima` [Q,k].
    """
    stride = TILE_POSITIONS // GROUP_POSITIONS
    first = groups // stride * TILE_POSITIONS + groups % stride
    positions = (first[:, :, None] + stride * jnp.arange(GROUP_POSITIONS)).reshape(len(groups), -1)
    numbers = vectors.numbers[cell, positions]  # [Q, k * GROUP_POSITIONS, D]; XLA multiplies it while it is read
    kind = jnp.int32 if numbers.dtype == jnp.int8 else jnp.float32
    products = (queries.numbers[:, None].astype(kind) * numbers.astype(kind)).sum(axis=-1)
    errors = (None if x is None else x[cell, positions] for x in (vectors.scale, vectors.norm, vectors.error))
    return bound_products(products, queries, Compressed(None, *errors), mask[positions]), positions
