"""Vectors in fewer bits, with measured errors: an exact search whose candidates are found in 16 or 8 bits.

A vector v becomes v' = numbers * scale, and the error e = v - v' is measured. By Cauchy-Schwarz

    q.d = q'.d' + q.e_d + e_q.d' <= q'.d' + |q||e_d| + |e_q||d'|

so that a passage's score is an upper bound of its product: a passage whose bound is below the k-th exact score cannot
be missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxret.search.rounding import TINY, UNIT, upper_norms

INT8 = 127  # largest number of int8 that is used, so that it has an opposite
LONGEST_INT8 = (2**31 - 1) // INT8**2  # numbers of a vector: longer ones may overflow the int32 that products add up in


class Compressed(NamedTuple):
    """Vectors in a precision, numpy's or JAX's. Under float32 nothing is lost, and all but `numbers` is None."""

    numbers: Any  # [...,D] of the precision's dtype
    scale: Any = None  # float32 [...], under int8 alone
    norm: Any = None  # float32 [...]: at least |v|, and at least |v'|
    error: Any = None  # float32 [...]: at least |v - v'|


@dataclass(frozen=True)
class Precision:
    """Numbers in which candidates are computed."""

    name: str  # a key of `PRECISIONS`
    dtype: Any  # of the stored vectors
    growth: float  # |v'| is at most 1 + this times |v|; under int8, times sqrt(D) for vectors of D numbers
    # candidates beyond k in the first round, as a share of k: a little more than MiniLM's vectors of real texts needed
    # for a proof (7 % in bfloat16, 35 % in int8)
    more: float

    def unit(self, dimension: int) -> float:
        """Return the unit roundoff with which `rounding_error` covers the computation of an upper bound.

        Products of float32; or exact products, added up in float32 or (int8) in int32, and 11 more roundings for scales
        and errors, of vectors that are longer by `growth`. (`rounding_error` doubles it: tensor cores truncate.)
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
    """Return the precision of a name. Raises ValueError."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown search precision {name!r}; it must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def compress(vectors: np.ndarray, precision: Precision) -> Compressed:
    """Return finite float32 vectors [N,D] in a precision. Raises ValueError for vectors too long for int8.

    int8: scale = max|v| / 127, numbers = rint(v / scale). float16: numbers outside its normal range become the largest
    of it, or 0, because devices do not agree on the others; the error includes the difference.
    """
    if precision.name == "float32":
        return Compressed(vectors)
    scale = None
    if precision.name == "int8":
        if vectors.shape[1] > LONGEST_INT8:
            raise ValueError(
                f"vectors of {vectors.shape[1]} numbers are too long for int8 ({LONGEST_INT8}): search in bfloat16"
            )
        scale = np.abs(vectors).max(axis=1) / np.float32(INT8)
        scale[scale < TINY] = 0  # a device may flush it
        numbers = np.rint(vectors / np.where(scale, scale, np.inf)[:, None]).astype(np.int8)
        short = numbers.astype(np.float32) * scale[:, None]
    elif precision.name == "float16":
        limits = np.finfo(np.float16)
        normal = np.where(np.abs(vectors) < float(limits.smallest_normal), 0, vectors)
        numbers = np.clip(normal, limits.min, limits.max).astype(np.float16)
        short = numbers.astype(np.float32)
    else:
        numbers = vectors.astype(precision.dtype)
        short = numbers.astype(np.float32)
    norms = upper_norms(vectors)
    # int8: numbers * scale is rounded, and so is the difference, each by at most a unit of numbers no larger than v's.
    error = upper_norms(vectors - short) + (4 * UNIT * norms if scale is not None else 0)
    longest = np.maximum(norms, upper_norms(short) * (1 + 2 * UNIT))
    return Compressed(numbers, scale, rounded_up(longest), rounded_up(error))


def rounded_up(values: np.ndarray) -> np.ndarray:
    """Return the lowest float32 numbers that are not below these float64 ones."""
    near = values.astype(np.float32)
    return np.where(near < values, np.nextafter(near, np.float32(np.inf)), near)


def losses(queries: Compressed, passages: Compressed) -> np.ndarray:
    """Return upper bounds of the errors of products of compressed vectors, float64 [Q,N]."""
    if passages.error is None:
        return np.zeros((len(queries.numbers), len(passages.numbers)))
    outer: np.ndarray = np.multiply.outer(queries.norm.astype(np.float64), passages.error)
    return outer + np.multiply.outer(queries.error.astype(np.float64), passages.norm)
