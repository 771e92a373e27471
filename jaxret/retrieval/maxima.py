"""On a GPU: maxima of groups of scores, taken inside the product, so that the scores are never in memory.

XLA's own program writes the scores of a cell and reads them again, and copies the cell's vectors before: two and a half
times the bytes of the product alone (docs/scale.md). Here a kernel writes an eighth of that, once; the groups with the
highest maxima hold the best rows, and what is in them is multiplied again: k * GROUP rows of millions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxret.retrieval.best import power_of_two
from jaxret.retrieval.precision import Compressed

GROUP = 8  # places of a group: `PLACES // GROUP` apart, so that a thread has all of them
QUERIES, PLACES, NUMBERS = 128, 128, 64  # of a tile: its products are 64 KiB of registers
LEAST = 16  # queries of a product on tensor cores
# Pallas has Triton count in 32 bits up to here, and Triton takes these as signed: numbers of int8 after 2**31 are lost.
IN_32_BITS = 2**32


def can_take(platform: str, width: int, dimension: int, dtype: Any) -> bool:
    """Whether there is a kernel for rows of `width` vectors: tensor cores have no float32."""
    return platform == "cuda" and width == 1 and dimension % NUMBERS == 0 and dtype != jnp.float32


def whole_tiles(count: int) -> int:
    """As many queries as there are, and some more: tiles have LEAST or QUERIES of them, and no number between that the
    self-check does not see."""
    return LEAST if count <= LEAST else max(QUERIES, power_of_two(count))


def group_maxima(
    queries: Compressed, vectors: Compressed, cell: jax.Array, there: jax.Array, interpret: bool = False
) -> jax.Array:
    """Of each group of a cell, what the products with queries [Q,D] are at most, float32 [Q, n // GROUP]; vectors: of
    all cells [cells,n,D]; there [n]: 0 where a place has a vector, else -inf. Q is of `whole_tiles`."""
    (count, dimension), size = queries.numbers.shape, vectors.numbers.shape[1]
    if vectors.numbers.size > IN_32_BITS // 2 and _bytes(vectors.numbers) <= IN_32_BITS:
        vectors = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, cell, 1), vectors)  # a copy
        cell = jnp.zeros_like(cell)
    rows = min(QUERIES, count)

    def of_queries(x: jax.Array) -> pl.BlockSpec:
        shape = (rows, *x.shape[1:])
        return pl.BlockSpec(shape, lambda query, place: (query, *(0,) * (len(shape) - 1)))

    asked, held = (jax.tree.leaves(x) for x in (queries, vectors))
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    said = {
        "flops": 2 * count * size * dimension,
        "bytes": sum(map(_bytes, [*asked, there])) + 4 * count * size // GROUP,
    }
    said["bytes"] += sum(_bytes(x) // len(x) for x in held)  # of one cell
    call = pl.pallas_call(
        partial(_tile, jax.tree.structure(queries), dimension),
        grid=(count // rows, size // PLACES),  # the first runs fastest: places come from memory once, for all queries
        in_specs=[
            *map(of_queries, asked),
            *[everywhere] * len(held),
            pl.BlockSpec((PLACES,), lambda query, place: (place,)),
            everywhere,
        ],
        out_specs=pl.BlockSpec((rows, PLACES // GROUP), lambda query, place: (query, place)),
        out_shape=jax.ShapeDtypeStruct((count, size // GROUP), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=3),
        # A plan reads there what the kernel does (plan/hlo.py): its call has no place for it.
        name="_".join(["group_maxima", *(f"{what}_{number}" for what, number in said.items())]),
        interpret=interpret,
    )
    return call(*asked, *held, there, cell[None])


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def _tile(tree: Any, dimension: int, *refs: Any) -> None:
    """Products of some queries with some places of a cell, and their maxima."""
    leaves = tree.num_leaves
    asked, held = jax.tree.unflatten(tree, refs[:leaves]), jax.tree.unflatten(tree, refs[leaves : 2 * leaves])
    there, cell, found = refs[2 * leaves :]
    number, places = cell[0], pl.ds(pl.program_id(1) * PLACES, PLACES)
    rows = found.shape[0]
    kind = jnp.int32 if asked.numbers.dtype == jnp.int8 else jnp.float32

    def add(step: jax.Array, products: jax.Array) -> jax.Array:
        some = pl.ds(step * NUMBERS, NUMBERS)
        ours, theirs = asked.numbers[:, some], held.numbers[number, places, some]
        return products + jax.lax.dot_general(ours, theirs, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    products = jax.lax.fori_loop(0, dimension // NUMBERS, add, jnp.zeros((rows, PLACES), kind))
    part = Compressed(*(None if x is None else x[number, places] for x in (None, held.scale, held.norm, held.error)))
    own = Compressed(*(None if x is None else x[...] for x in (None, asked.scale, asked.norm, asked.error)))
    scores = at_most(products, own, part, there[...])
    found[...] = scores.reshape(rows, GROUP, PLACES // GROUP).max(axis=1)


def at_most(products: jax.Array, queries: Compressed, vectors: Compressed, there: jax.Array) -> jax.Array:
    """What products are at most, float32: [Q,n] of queries [Q] and vectors [n], or those of each query [Q,n]."""
    scores = products.astype(jnp.float32)
    if queries.scale is not None:
        scores = scores * queries.scale[:, None] * vectors.scale
    return scores + there + queries.norm[:, None] * vectors.error + queries.error[:, None] * vectors.norm


def best_of_groups(
    queries: Compressed, vectors: Compressed, cell: jax.Array, there: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores and places in the cell [Q, k * GROUP] of what is in groups [Q,k] of `group_maxima`."""
    apart = PLACES // GROUP
    first = chosen // apart * PLACES + chosen % apart
    places = (first[:, :, None] + apart * jnp.arange(GROUP)).reshape(len(chosen), -1)
    numbers = vectors.numbers[cell, places]  # [Q, k * GROUP, D]; not in memory: it is multiplied as it is read
    kind = jnp.int32 if numbers.dtype == jnp.int8 else jnp.float32
    products = (queries.numbers[:, None].astype(kind) * numbers.astype(kind)).sum(axis=-1)
    rest = (None if x is None else x[cell, places] for x in (vectors.scale, vectors.norm, vectors.error))
    return at_most(products, queries, Compressed(None, *rest), there[places]), places
