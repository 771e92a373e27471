"""Regularization of sparse vectors: FLOPS and L1 over a batch, with weights that grow at the start of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxret.types import Scalar

SPARSITY_NORMS = ("flops", "l1")


@dataclass(frozen=True)
class SparsitySettings:
    """Penalties on the weights of words (Formal et al. 2021, section 3.2)."""

    query: float = 0.0  # weight of the queries' penalty; 0: off
    passage: float = 0.0  # weight of the passages' penalty
    query_norm: str = "flops"  # "flops" or "l1"
    passage_norm: str = "flops"  # "flops" or "l1"
    steps: int = 0  # steps in which both weights grow with the square of the batch's number; 0: they do not change
    batches_per_step: int = 1  # `config.train.accumulate`

    def __post_init__(self) -> None:
        for key in ("query_norm", "passage_norm"):
            if (norm := getattr(self, key)) not in SPARSITY_NORMS:
                raise ValueError(f"loss.sparsity.{key} is {norm!r}; it must be one of {', '.join(SPARSITY_NORMS)}")
        for key in ("query", "passage", "steps"):
            if (value := getattr(self, key)) < 0:
                raise ValueError(f"loss.sparsity.{key} is {value}; it must be at least 0")

    def growth(self, batch_number: Int[jax.Array, ""] | int | None) -> Scalar | float:
        """Return the factor of both weights in a batch (from 0): min(1, ((batch_number + 1) / batches)^2), where
        `batches` is the number of batches in `steps`; 1 if `batch_number` is None."""
        if batch_number is None or not self.steps:
            return 1.0
        batches = jnp.float32(self.steps * self.batches_per_step)
        return jnp.minimum(1.0, ((batch_number + 1) / batches) ** 2)


class Sparsity(NamedTuple):
    """Penalties of a batch, and the numbers of words of its texts."""

    query: Scalar  # penalty of the queries
    passage: Scalar  # penalty of the passages
    query_words: Scalar  # mean number of words of a query
    passage_words: Scalar  # mean number of words of a passage
    growth: Scalar | float  # factor of the penalties' weights


def penalty(norm: str, weights: Float[jax.Array, "B D"], exists: Bool[jax.Array, " B"]) -> Scalar:
    """Return sum_j (mean_i |w_ij|)^2 for "flops" (Paria et al. 2020, eq. 5), mean_i sum_j |w_ij| for "l1".

    Args:
        norm: one of SPARSITY_NORMS.
        weights: weights of all texts of the batch on all devices, because FLOPS is not the sum over parts of a batch.
        exists: False for empty rows, which are ignored.
    """
    means = jnp.sum(jnp.where(exists[:, None], jnp.abs(weights), 0.0), axis=0) / jnp.maximum(jnp.sum(exists), 1)
    return jnp.sum(means**2) if norm == "flops" else jnp.sum(means)


def mean_words(weights: Float[jax.Array, "B D"], exists: Bool[jax.Array, " B"]) -> Scalar:
    """Return the mean number of words whose weight is not 0."""
    return jnp.sum(exists[:, None] & (weights != 0)) / jnp.maximum(jnp.sum(exists), 1)
