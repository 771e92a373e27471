"""The best of many scores, in XLA on any device, without sorting a whole row of scores."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxret.search.backends.precision import Compressed

DEVIATIONS = 6  # of a share's size that a cell gives back beyond it
SMALLEST = 8  # and so many more


def power_of_two(count: int) -> int:
    """Return the next power of two: few sizes, so few programs are compiled."""
    return 1 << (count - 1).bit_length()


def rounded_size(count: int, steps: int = 16) -> int:
    """Return the next size in steps of a sixteenth of a power of two: blocks from which rows were left out have many
    sizes, and each size is a program."""
    step = max(1, power_of_two(count) // steps)
    return -(-count // step) * step


def share(k: int, parts: int, size: int) -> int:
    """Return how many rows one of several parts returns, each of which has `size`: its share of the best k, if these
    lie anywhere, and some more."""
    expected = k / parts
    return min(size, math.ceil(expected + DEVIATIONS * math.sqrt(expected)) + SMALLEST)


def upper_bounds(queries: Compressed, vectors: Compressed, exists: jax.Array) -> jax.Array:
    """Return upper bounds of the products of [Q,D] and [N,D], float32 [Q,N] (`precision.py`); -inf where no vector
    exists [N]."""
    kind = queries.numbers.dtype
    exact = jax.lax.Precision.HIGHEST if kind in (jnp.float32, jnp.float16) else None
    product = jnp.einsum(
        "qd,nd->qn",
        queries.numbers,
        vectors.numbers,
        precision=exact,
        preferred_element_type=jnp.int32 if kind == jnp.int8 else jnp.float32,
    ).astype(jnp.float32)
    if queries.scale is not None:
        product = product * queries.scale[:, None] * vectors.scale
    # Before anything is added: a GPU's product would start from a matrix [Q,N] of what is added to it.
    product = jnp.where(exists, product, -jnp.inf)
    if queries.error is not None:
        product = product + queries.norm[:, None] * vectors.error + queries.error[:, None] * vectors.norm
    return product


def best_of_cell(
    queries: Compressed, vectors: Compressed, exists: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `best` of the positions [n] of a cell, each with as many vectors of [n * width, D].

    Args:
        queries: [Q,D].
        vectors: of the cell.
        exists: [n], whether a position has a row.
        count: positions to return.
    """
    size = len(exists)
    scores = upper_bounds(queries, vectors, jnp.repeat(exists, vectors.numbers.shape[0] // size))
    return best(scores.reshape(len(scores), size, -1).max(axis=-1), count)


def highest(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the `count` highest of each row of [Q,n], descending, and their columns.

    They are behind barriers: XLA sorts the whole row where it sees that only a part of the output of `top_k` is used.
    """
    top, columns = jax.lax.top_k(scores, count)
    return jax.lax.optimization_barrier(top), jax.lax.optimization_barrier(columns)


def best(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the `count` highest scores of each row of [Q,n], their columns, and an upper bound on all others [Q].

    They lie in the `count` groups of columns with the highest maxima: no row is sorted whole.
    """
    n_queries, n = scores.shape
    group = power_of_two(max(1, math.isqrt(n // count)))
    if group < 4:
        top, places = highest(scores, count)
    else:
        # Column c is in group c % groups: so maxima are taken of whole rows of numbers that lie together.
        grid = jnp.pad(scores, ((0, 0), (0, -n % group)), constant_values=-jnp.inf).reshape(n_queries, group, -1)
        maxima, best_groups = highest(grid.max(axis=1), count)
        inside = jnp.take_along_axis(grid, best_groups[:, None], axis=2)
        # The maxima first: little of the rest is above the lowest of them, which a CPU's partial sort sees at once.
        peaks = inside.argmax(axis=1)
        others = jnp.where(jnp.arange(group)[:, None] == peaks[:, None], -jnp.inf, inside).reshape(n_queries, -1)
        top, columns = highest(jnp.concatenate([maxima, others], axis=1), count)
        ranks, member = columns % count, columns // count - 1
        member = jnp.where(member < 0, jnp.take_along_axis(peaks, ranks, axis=1), member)
        places = jnp.take_along_axis(best_groups, ranks, axis=1) + member * grid.shape[2]
    return top, places, top[:, -1] if count < n else jnp.full_like(top[:, -1], -jnp.inf)


def merge(tops: jax.Array, rows: jax.Array, bound: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the k best hits of several cells or devices, and the bound [Q] including the scores that this leaves out.

    Args:
        tops: scores [several,Q,n].
        rows: rows [several,Q,n].
        bound: of the scores left out before [Q].
        k: hits to return.
    """
    n_queries = tops.shape[1]
    all_tops, all_rows = (jnp.moveaxis(x, 0, 1).reshape(n_queries, -1) for x in (tops, rows))
    if all_tops.shape[1] <= k and len(tops) == 1:
        return all_tops, all_rows, bound
    top, places = highest(all_tops, min(k + 1, all_tops.shape[1]))
    bound = jnp.maximum(bound, top[:, k:].max(axis=1, initial=-jnp.inf))
    return top[:, :k], jnp.take_along_axis(all_rows, places[:, :k], axis=1), bound
