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


def score(
    queries: Float[jax.Array, "Q D"], documents: Float[jax.Array, "N V D"], mask: Bool[jax.Array, "N V"]
) -> Float[jax.Array, "Q N"]:
    """score[i,j] = max_k q_i . v[j,k]: row = query, column = document."""
    return jnp.max(similarities(queries, documents, mask), axis=-1)
