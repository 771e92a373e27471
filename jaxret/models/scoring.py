"""Scores of queries and passages in float32: dot products and late interaction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

# Score of vectors that do not exist: below any real score, and finite, so that a text of only padding gives no NaN.
MASKED_SCORE = -1e9


def unit_length(vectors: Float[jax.Array, "*rows D"]) -> Float[jax.Array, "*rows D"]:
    """Return every vector scaled to length 1. A vector of zeros stays unchanged."""
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def similarities(
    queries: Float[jax.Array, "Q D"], passages: Float[jax.Array, "N V D"], mask: Bool[jax.Array, "N V"]
) -> Float[jax.Array, "Q N V"]:
    """Return S[i,j,k] = q_i . v[j,k] in float32, or MASKED_SCORE for vectors that do not exist."""
    product = jnp.einsum(
        "qd,nvd->qnv",
        queries.astype(jnp.float32),
        passages.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.where(mask[None], product, MASKED_SCORE)


def late_interaction(
    queries: Float[jax.Array, "Q U D"],
    query_mask: Bool[jax.Array, "Q U"],
    passages: Float[jax.Array, "N V D"],
    mask: Bool[jax.Array, "N V"],
) -> Float[jax.Array, "Q N"]:
    """Return score[i,j] = sum_u max_k q[i,u] . v[j,k] over query vectors that exist (ColBERT eq. 3).

    It computes one query vector at a time, so that neither the forward nor the backward pass holds [Q,U,N,V].

    Args:
        queries: vectors q of the queries.
        query_mask: mask of query vectors that exist.
        passages: vectors v of the passages.
        mask: mask of passage vectors that exist.
    """

    @jax.checkpoint
    def add(total: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        vectors, exists = inputs
        best = jnp.max(similarities(vectors, passages, mask), axis=-1)
        return total + jnp.where(exists[:, None], best, 0.0), None

    start = jnp.zeros((len(queries), len(passages)))
    total, _ = jax.lax.scan(add, start, (jnp.moveaxis(queries, 1, 0), jnp.moveaxis(query_mask, 1, 0)))
    return total
