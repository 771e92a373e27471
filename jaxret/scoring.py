"""Query-document scores, in float32 and the same everywhere: a dot product, then the maximum over vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

MASKED = -1e9  # far below any real score, yet finite in float32, so a row of nothing but padding makes no NaN


def similarities(
    queries: Float[jax.Array, "Q D"], documents: Float[jax.Array, "N V D"], mask: Bool[jax.Array, "N V"]
) -> Float[jax.Array, "Q N V"]:
    """S[i,j,k] = q_i . v[j,k] in float32; vectors that do not exist score MASKED."""
    product = jnp.einsum(
        "qd,nvd->qnv",
        queries.astype(jnp.float32),
        documents.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.where(mask[None], product, MASKED)


def late_interaction(
    queries: Float[jax.Array, "Q U D"],
    query_mask: Bool[jax.Array, "Q U"],
    documents: Float[jax.Array, "N V D"],
    mask: Bool[jax.Array, "N V"],
) -> Float[jax.Array, "Q N"]:
    """score[i,j] = sum_u max_k q[i,u] . v[j,k] over query vectors that exist (ColBERT eq. 3).

    One query vector at a time, so that [Q,U,N,V] is never held, in the backward pass neither.
    """

    @jax.checkpoint
    def add(total: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        vectors, exists = inputs
        best = jnp.max(similarities(vectors, documents, mask), axis=-1)
        return total + jnp.where(exists[:, None], best, 0.0), None

    start = jnp.zeros((len(queries), len(documents)))
    total, _ = jax.lax.scan(add, start, (jnp.moveaxis(queries, 1, 0), jnp.moveaxis(query_mask, 1, 0)))
    return total
