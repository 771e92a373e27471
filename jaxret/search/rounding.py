"""Upper bounds of rounding errors, and exact scores."""

from __future__ import annotations

import math

import numpy as np

from jaxret.types import LONGEST_NORM

UNIT = 2.0**-24  # unit roundoff of float32
WIDE_UNIT = 2.0**-53  # unit roundoff of float64
TINY = 2.0**-126  # smallest normal float32; a device may take smaller numbers for 0


def rounding_error(dimension: int, query_norms: np.ndarray, largest_norm: float) -> np.ndarray:
    """Return an upper bound of the error of a float32 dot product, for each query, float64 [Q].

    |fl(q.d) - q.d| <= gamma_D sum|q_i d_i| <= gamma_D |q||d|, with gamma_D = D u / (1 - D u), for any order of the sum,
    with or without fused multiply-add (Higham, Accuracy and Stability of Numerical Algorithms, 3.1-3.5). The bound is
    doubled, for D up to 2^22 and for TPUs, which compute a float32 product from six bfloat16 products. The second term
    is for underflow: a device may take each small input, product and sum for 0.
    """
    norms = query_norms.astype(np.float64)
    return 2 * dimension * UNIT * norms * largest_norm + dimension * TINY * (2 + norms + largest_norm)


def sum_error(dimension: int, query_norms: np.ndarray, largest_norm: float, unit: float = UNIT) -> float:
    """Return an upper bound of the error of sum_u max_v q_u . d_v, from the products and from their sum.

    Args:
        dimension: D.
        query_norms: norms of the vectors of one query.
        largest_norm: largest norm of a passage vector.
        unit: unit roundoff of the arithmetic.
    """
    products = rounding_error(dimension, query_norms, largest_norm).sum() * (unit / UNIT)
    return float(products + 2 * len(query_norms) * unit * (query_norms.sum() * largest_norm + products))


def upper_norms(vectors: np.ndarray) -> np.ndarray:
    """Return upper bounds of the L2 norms of float32 vectors [N,D], float64 [N].

    The bound is NaN or infinite if a vector has a NaN or an infinity, or is so long (LONGEST_NORM) that products
    could overflow.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors).astype(np.float64)
    squares[squares >= LONGEST_NORM**2] = np.inf
    dimension = vectors.shape[1]
    return np.sqrt(squares * (1 + 2 * dimension * UNIT) + dimension * TINY)


def exact_score(query: np.ndarray, passage: np.ndarray) -> np.float32:
    """Return sum_u max_v q_u . d_v of float64 arrays [U,D] and [V,D] that hold float32 numbers.

    Products of float32 numbers are exact in float64, and `math.fsum` rounds their sum once.
    """
    return np.float32(math.fsum(max(math.fsum(products) for products in passage * vector) for vector in query))
