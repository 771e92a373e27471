"""Vectors in 16 or 8 bits with measured errors, for an exact search that finds candidates with them.

A vector v becomes v' = numbers * scale, and the error e = v - v' is measured. By Cauchy-Schwarz

    q.d = q'.d' + q.e_d + e_q.d' <= q'.d' + |q||e_d| + |e_q||d'|

The right side is the score of a passage: an upper bound of its product. So a passage whose score is below the k-th
exact score is not among the k best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxret.search.rounding import TINY, UNIT, upper_norms

INT8 = 127  # largest int8 number that is used; -128 is not used, because 128 does not exist
LONGEST_INT8 = (2**31 - 1) // INT8**2  # largest dimension: the int32 sum of more products may overflow


class Compressed(NamedTuple):
    """Vectors in a precision, as arrays of numpy or JAX. In float32, all fields except `numbers` are None."""

    numbers: Any  # [...,D], of the precision's dtype
    scale: Any = None  # float32 [...]; None except in int8
    norm: Any = None  # float32 [...]: at least |v|, and at least |v'|
    error: Any = None  # float32 [...]: at least |v - v'|


@dataclass(frozen=True)
class Precision:
    """The numbers with which the scores of candidates are computed."""

    name: str  # a key of `PRECISIONS`
    dtype: Any  # dtype of the compressed vectors
    growth: float  # |v'| <= (1 + growth) |v|; in int8, <= (1 + growth * sqrt(D)) |v|
    # Candidates beyond k in the first round, as a share of k: a little more than MiniLM's vectors of real texts needed
    # for a proof (7 % in bfloat16, 35 % in int8).
    extra_candidates: float

    def unit(self, dimension: int) -> float:
        """Return the unit roundoff for which `rounding_error` covers the computation of an upper bound.

        Below float32, products are exact, and are added up in float32 or (int8) in int32. Scales and errors add 11
        roundings, and vectors are longer by `growth`. `rounding_error` doubles it, because tensor cores truncate.
        """
        if self.name == "float32":
            return UNIT
        longer = 1 + self.growth * (math.sqrt(dimension) if self.name == "int8" else 1)
        return UNIT * (1 + 8 / dimension) * longer**2


FLOAT32 = Precision("float32", np.float32, 0.0, 1 / 32)
PRECISIONS = {
    precision.name: precision
    for precision in (
        FLOAT32,
        Precision("float16", np.float16, 2.0**-11, 1 / 8),
        Precision("bfloat16", jnp.bfloat16, 2.0**-8, 1 / 5),
        Precision("int8", np.int8, 1 / (2 * INT8), 1 / 2),
    )
}


def find_precision(name: str) -> Precision:
    """Return the precision with a name. Raises ValueError for an unknown name."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown search precision {name!r}; it must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def compress(vectors: np.ndarray, precision: Precision) -> Compressed:
    """Return finite float32 vectors [N,D] in a precision. Raises ValueError if the dimension is too large for int8.

    int8: scale = max|v| / 127, numbers = rint(v / scale). float16: numbers outside its normal range become its largest
    number or 0, because devices treat subnormal numbers differently. The error includes these differences.
    """
    if precision.name == "float32":
        return Compressed(vectors)
    scale = None
    if precision.name == "int8":
        if vectors.shape[1] > LONGEST_INT8:
            raise ValueError(
                f"vectors have {vectors.shape[1]} dimensions; int8 allows at most {LONGEST_INT8}: search in bfloat16"
            )
        scale = np.abs(vectors).max(axis=1) / np.float32(INT8)
        scale[scale < TINY] = 0  # a device may take such a number for 0
        numbers = np.rint(vectors / np.where(scale, scale, np.inf)[:, None]).astype(np.int8)
        lossy_vectors = numbers.astype(np.float32) * scale[:, None]
    elif precision.name == "float16":
        limits = np.finfo(np.float16)
        normal = np.where(np.abs(vectors) < float(limits.smallest_normal), 0, vectors)
        numbers = np.clip(normal, limits.min, limits.max).astype(np.float16)
        lossy_vectors = numbers.astype(np.float32)
    else:
        numbers = vectors.astype(precision.dtype)
        lossy_vectors = numbers.astype(np.float32)
    norms = upper_norms(vectors)
    # int8: numbers * scale and the difference are rounded, each by at most UNIT times a number no larger than v's.
    error = upper_norms(vectors - lossy_vectors) + (4 * UNIT * norms if scale is not None else 0)
    longest = np.maximum(norms, upper_norms(lossy_vectors) * (1 + 2 * UNIT))
    return Compressed(numbers, scale, rounded_up(longest), rounded_up(error))


def rounded_up(values: np.ndarray) -> np.ndarray:
    """Return float64 values rounded up to float32."""
    rounded_values = values.astype(np.float32)
    return np.where(rounded_values < values, np.nextafter(rounded_values, np.float32(np.inf)), rounded_values)


def losses(queries: Compressed, passages: Compressed) -> np.ndarray:
    """Return upper bounds of the errors that compression causes in products, float64 [Q,N]."""
    if passages.error is None:
        return np.zeros((len(queries.numbers), len(passages.numbers)))
    outer: np.ndarray = np.multiply.outer(queries.norm.astype(np.float64), passages.error)
    return outer + np.multiply.outer(queries.error.astype(np.float64), passages.norm)
