"""One proxy vector for a list of vectors, so that a search of many lists begins with a search of few vectors.

The product of a query's proxy and a passage's proxy approximates the score sum_u max_v q_u . d_v, or ranks passages in
a similar order. The passages that it ranks highest are scored exactly (`candidates.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from jaxret.types import Ragged


@runtime_checkable
class Proxy(Protocol):
    """A function that turns a list of vectors into one vector."""

    @property
    def name(self) -> str: ...
    @classmethod
    def of(cls, dimension: int) -> Proxy:
        """Return the proxy for vectors of a dimension D."""
        ...

    @property
    def size(self) -> int:
        """Return the dimension of a proxy vector."""
        ...

    def query(self, vectors: np.ndarray) -> np.ndarray:
        """Return the proxy [size] of a query's vectors, float32 [U,D]."""
        ...

    def passage(self, vectors: np.ndarray) -> np.ndarray:
        """Return the proxy [size] of a passage's vectors, float32 [V,D]."""
        ...


@dataclass(frozen=True)
class MeanProxy:
    """The sum of the query's vectors, and the mean of the passage's vectors. In the score, means over v replace
    maxima."""

    dimension: int
    name: ClassVar[str] = "mean"

    @classmethod
    def of(cls, dimension: int) -> MeanProxy:
        return cls(dimension)

    @property
    def size(self) -> int:
        return self.dimension

    def query(self, vectors: np.ndarray) -> np.ndarray:
        total: np.ndarray = vectors.sum(axis=0)
        return total

    def passage(self, vectors: np.ndarray) -> np.ndarray:
        mean: np.ndarray = vectors.mean(axis=0)
        return mean


@dataclass(frozen=True, eq=False)
class MuveraProxy:
    """Fixed-dimensional encodings (MUVERA, Dhulipala et al. 2024, section 2): R encodings, concatenated.

    Each encoding divides space into B = 2^k buckets by the signs of k random products (the first product gives the
    highest bit), and maps a vector x to y = x P / sqrt(d') with a random matrix P of +1 and -1. A bucket of a query
    holds the sum of its y, a bucket of a passage their mean. A bucket without vectors of the passage holds the y of the
    vector whose signs differ least from the bucket's (the first of several). The product of two encodings approximates
    the score; the query's encoding is divided by R.
    """

    planes: np.ndarray  # [R,D,k] float32
    signs: np.ndarray  # [R,D,d'] float32, +1 or -1
    name: ClassVar[str] = "muvera"

    @classmethod
    def of(cls, dimension: int, repetitions: int = 20, bits: int = 4, width: int = 16) -> MuveraProxy:
        """Return a proxy with random numbers that are the same at each call; by default, vectors have 5,120 dimensions.

        Args:
            dimension: D.
            repetitions: R.
            bits: k.
            width: d'.
        """
        random = np.random.default_rng(0)
        planes = random.standard_normal((repetitions, dimension, bits), dtype=np.float32)
        signs = random.integers(0, 2, (repetitions, dimension, width)) * 2 - 1
        return cls(planes, signs.astype(np.float32))

    @property
    def size(self) -> int:
        repetitions, _, bits = self.planes.shape
        return int(repetitions * 2**bits * self.signs.shape[2])

    @cached_property
    def _joined_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the planes as one matrix [D, R*k], and the signs, divided by sqrt(d'), as one matrix [D, R*d']."""
        dimension, width = self.signs.shape[1:]
        planes = np.ascontiguousarray(self.planes.swapaxes(0, 1).reshape(dimension, -1))
        signs = np.ascontiguousarray(self.signs.swapaxes(0, 1).reshape(dimension, -1))
        return planes, signs / np.float32(np.sqrt(width))

    def _assign_buckets(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the buckets [R,n] int64 of vectors [n,D], and the mapped vectors y [R,n,d']."""
        repetitions, _, bits = self.planes.shape
        planes, signs = self._joined_matrices
        above = (vectors @ planes > 0).reshape(len(vectors), repetitions, bits)
        buckets = above @ (1 << np.arange(bits)[::-1])
        return buckets.T, (vectors @ signs).reshape(len(vectors), repetitions, -1).swapaxes(0, 1)

    def _sum_buckets(self, buckets: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of the mapped vectors y in each bucket [R,B,d'], and their number [R,B]."""
        inside = (buckets[:, None] == np.arange(2 ** self.planes.shape[2])[:, None]).astype(np.float32)
        return inside @ y, inside.sum(axis=2)

    def query(self, vectors: np.ndarray) -> np.ndarray:
        sums, _ = self._sum_buckets(*self._assign_buckets(vectors))
        encoding: np.ndarray = sums.reshape(-1) / np.float32(len(self.planes))
        return encoding

    def passage(self, vectors: np.ndarray) -> np.ndarray:
        buckets, y = self._assign_buckets(vectors)
        sums, counts = self._sum_buckets(buckets, y)
        means = sums / np.maximum(counts, 1)[..., None]
        repetition, empty = np.nonzero(counts == 0)
        sign_differences = np.bitwise_count(buckets[repetition] ^ empty[:, None])  # [empty buckets, n]
        means[repetition, empty] = y[repetition, sign_differences.argmin(axis=1)]
        return means.reshape(-1)


PROXIES: dict[str, type[MeanProxy] | type[MuveraProxy]] = {proxy.name: proxy for proxy in (MeanProxy, MuveraProxy)}


def query_proxies(proxy: Proxy, queries: Ragged) -> np.ndarray:
    """Return the proxies [Q,size] float32 of lists of vectors."""
    return np.stack([proxy.query(vectors) for vectors in queries]).astype(np.float32)
