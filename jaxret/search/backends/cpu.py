"""XLA on the cores of one CPU device: a program for each cell, several at a time.

In one program XLA would copy every cell before it multiplies it, and select the best scores on one core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.search.backends.precision import Compressed
from jaxret.search.backends.top_k import best_of_cell, merge, share

MOST_SCORES = 2**28  # scores in memory at a time: 1 GiB, eight times the scores of a cell with a thousand queries

CellHits = tuple[Any, Any, Any]  # scores, rows, bounds


def search_cells_on_cpu(queries: Compressed, vectors: Compressed, rows: int, size: int, k: int) -> CellHits:
    """Return scores and rows [Q,k], and bounds [Q], like `accelerators.search_cells`.

    Args:
        queries: query vectors [Q,D].
        vectors: vectors of all cells.
        rows: number of rows that exist.
        size: positions of a cell.
        k: rows to return for each query.
    """
    host_vectors = jax.tree.map(np.asarray, vectors)  # no copy; and one cell of a numpy array is not a copy either
    count, cells = len(queries.numbers), len(host_vectors.numbers)
    threads = max(1, min(os.cpu_count() or 1, cells, MOST_SCORES // (count * host_vectors.numbers.shape[1])))
    per_cell = share(k, cells, size)

    def search_cell(number: int) -> CellHits:
        cell = jax.tree.map(lambda x: x[number], host_vectors)
        return jax.block_until_ready(_search_cell(queries, cell, number, rows, cells, size, per_cell))

    def merge_queries(part: slice) -> CellHits:
        tops, positions, bounds = (np.stack([np.asarray(x)[part] for x in xs]) for xs in zip(*cell_hits, strict=True))
        return jax.block_until_ready(_merge(tops, positions, bounds, k))

    with ThreadPoolExecutor(threads) as pool:
        map_tasks: Callable[[Any, Iterable[Any]], Iterable[CellHits]] = pool.map if threads > 1 else map
        cell_hits = list(map_tasks(search_cell, range(cells)))
        step = -(-count // threads)
        results = list(map_tasks(merge_queries, [slice(start, start + step) for start in range(0, count, step)]))
    tops, positions, bounds = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    return tops, positions, bounds


@partial(jax.jit, static_argnums=(4, 5, 6))
def _search_cell(
    queries: Compressed, cell: Compressed, number: jax.Array, rows: jax.Array, cells: int, size: int, count: int
) -> CellHits:
    rows_of_cell = jnp.arange(size) * cells + number
    top, positions, bound = best_of_cell(queries, cell, rows_of_cell < rows, count)
    return top, rows_of_cell[positions], bound


@partial(jax.jit, static_argnums=3)
def _merge(tops: jax.Array, positions: jax.Array, bounds: jax.Array, k: int) -> CellHits:
    return merge(tops, positions, bounds.max(axis=0), k)
