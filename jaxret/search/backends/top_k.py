"""Selection of the highest of many scores, in XLA on any device, without sorting whole rows of scores."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxret.search.backends.precision import Compressed

# A part returns this many standard deviations, and this many rows, more than its mean share of the k best.
DEVIATIONS = 6
EXTRA_ROWS = 8


def power_of_two(count: int) -> int:
    """Return the next power of two. With few sizes, few programs are compiled."""
    return 1 << (count - 1).bit_length()


def rounded_size(count: int, steps: int = 16) -> int:
    """Return a count, rounded up to a multiple of a sixteenth of the next power of two.

    Blocks of a filtered corpus have many sizes, and a program is compiled for each rounded size.
    """
    step = max(1, power_of_two(count) // steps)
    return -(-count // step) * step


def share(k: int, parts: int, size: int) -> int:
    """Return how many rows each of several parts with `size` rows returns of the k best rows, which are anywhere."""
    expected = k / parts
    return min(size, math.ceil(expected + DEVIATIONS * math.sqrt(expected)) + EXTRA_ROWS)


def upper_bounds(queries: Compressed, vectors: Compressed, exists: jax.Array) -> jax.Array:
    """Return upper bounds of the products of queries [Q,D] and vectors [N,D], float32 [Q,N] (`precision.py`).

    The bound is -inf where `exists` [N] is False.
    """
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
    # Before the errors are added: else XLA on a GPU starts the product from a matrix [Q,N] of these errors.
    product = jnp.where(exists, product, -jnp.inf)
    if queries.error is not None:
        product = product + queries.norm[:, None] * vectors.error + queries.error[:, None] * vectors.norm
    return product


def best_of_cell(
    queries: Compressed, vectors: Compressed, exists: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the result of `best` for the n positions of a cell.

    Args:
        queries: query vectors [Q,D].
        vectors: vectors of the cell [n * width, D].
        exists: whether a position has a row [n].
        count: positions to return.
    """
    size = len(exists)
    scores = upper_bounds(queries, vectors, jnp.repeat(exists, vectors.numbers.shape[0] // size))
    return best(scores.reshape(len(scores), size, -1).max(axis=-1), count)


def highest(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the `count` highest scores of each row of [Q,n], descending, and their columns.

    Barriers hide how the output is used, because XLA sorts whole rows if only a part of the output of `top_k` is used:
    for the 100 best of 64 x 65,536 scores, that takes 840 ms on a CPU instead of 9 (python bench/alternatives.py).
    """
    top, columns = jax.lax.top_k(scores, count)
    return jax.lax.optimization_barrier(top), jax.lax.optimization_barrier(columns)


def best(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the `count` highest scores of each row of [Q,n], their columns, and an upper bound of all others [Q].

    Only the `count` groups of columns with the highest maxima are searched, because they contain these scores: for the
    100 best of 64 x 65,536 scores, that takes 5 ms on a CPU, and `jax.lax.top_k` 9 (python bench/alternatives.py).
    """
    n_queries, n = scores.shape
    group = power_of_two(max(1, math.isqrt(n // count)))
    if group < 4:
        top, positions = highest(scores, count)
    else:
        # Column c is in group c % groups, so that a maximum is taken of contiguous rows.
        grid = jnp.pad(scores, ((0, 0), (0, -n % group)), constant_values=-jnp.inf).reshape(n_queries, group, -1)
        maxima, best_groups = highest(grid.max(axis=1), count)
        inside = jnp.take_along_axis(grid, best_groups[:, None], axis=2)
        # The maxima come first. Few other scores are above the lowest of them, so a CPU's partial sort is fast.
        peaks = inside.argmax(axis=1)
        lower_scores = jnp.where(jnp.arange(group)[:, None] == peaks[:, None], -jnp.inf, inside).reshape(n_queries, -1)
        top, columns = highest(jnp.concatenate([maxima, lower_scores], axis=1), count)
        ranks, member = columns % count, columns // count - 1
        member = jnp.where(member < 0, jnp.take_along_axis(peaks, ranks, axis=1), member)
        positions = jnp.take_along_axis(best_groups, ranks, axis=1) + member * grid.shape[2]
    return top, positions, top[:, -1] if count < n else jnp.full_like(top[:, -1], -jnp.inf)


def merge(tops: jax.Array, rows: jax.Array, bound: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the scores and rows of the k best hits of several cells or devices, and a bound of all other scores [Q].

    Args:
        tops: scores of the hits [cells or devices, Q, n].
        rows: rows of the hits [cells or devices, Q, n].
        bound: upper bound of the scores that are not in `tops` [Q].
        k: hits to return for each query.
    """
    n_queries = tops.shape[1]
    all_tops, all_rows = (jnp.moveaxis(x, 0, 1).reshape(n_queries, -1) for x in (tops, rows))
    if all_tops.shape[1] <= k and len(tops) == 1:
        return all_tops, all_rows, bound
    top, positions = highest(all_tops, min(k + 1, all_tops.shape[1]))
    bound = jnp.maximum(bound, top[:, k:].max(axis=1, initial=-jnp.inf))
    return top[:, :k], jnp.take_along_axis(all_rows, positions[:, :k], axis=1), bound
