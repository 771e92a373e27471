"""Vectors in int8 beside those in float32, for questions that come alone: one question takes as long as reading the
vectors, and these are a quarter of the bytes.

With a scale for each dimension, s_j = max |d_j| / 127, a vector d becomes z_j = rint(d_j / s_j), which represents d'_j
= z_j s_j. A query becomes w_j = rint(q_j s_j / t), with t = max |q_j s_j| / 127. The errors e = d - d' and r_j = q_j
s_j - t w_j are measured. With E and Z, the largest |e| and |z| of any vector, Cauchy-Schwarz gives

    q.d = q.d' + q.e = t w.z + r.z + q.e <= t w.z + |r| Z + |q| E

so no vector that FAISS leaves out has a product above that bound for the last w.z that it returns. The vectors that it
returns are multiplied again in float32. (FAISS rounds a query of this index to int8 by itself, without a scale, where
AVX has a product of bytes: integers from -127 to 127 are unchanged, and w.z is exact.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.search.backends.precision import INT8, rounded_up
from jaxret.search.rounding import TINY, UNIT, rounding_error, upper_norms

ROWS = 8192  # that are rounded at a time
OVER = 4  # candidates for each vector that is wanted: vectors drawn at random need as many until they are proven
MOST = 1024  # candidates; where more are needed float32 is as fast


class Quantized:
    """Vectors [N,D] float32, and the same in int8, D bytes each."""

    def __init__(self, faiss: Any, vectors: np.ndarray) -> None:
        self.faiss, self.vectors = faiss, vectors
        parts, dimension = range(0, len(vectors), ROWS), vectors.shape[1]
        largest = np.max([np.abs(vectors[start : start + ROWS]).max(axis=0) for start in parts], axis=0)
        self.scale = largest / np.float32(INT8)
        self.scale[self.scale < TINY] = 0  # a product may flush it
        divisors = np.where(self.scale, self.scale, np.inf)
        kind = faiss.ScalarQuantizer.QT_8bit_direct_signed  # a number is its code: there is nothing to learn
        self.index = faiss.IndexScalarQuantizer(dimension, kind, faiss.METRIC_INNER_PRODUCT)
        self.index.is_trained = True
        self.max_error = self.longest = self.longest_code = 0.0  # the largest |e|, |d'|, |z|
        for start in parts:
            some = vectors[start : start + ROWS]
            codes = np.rint(some / divisors)
            self.index.add(codes)
            short, norms = codes * self.scale, upper_norms(some)
            # codes * scale is rounded, and so is the difference, each by at most a unit of numbers like the vector's.
            self.max_error = max(self.max_error, float((upper_norms(some - short) + 4 * UNIT * norms).max()))
            self.longest = max(self.longest, float(upper_norms(short).max()) * (1 + 2 * UNIT))
            self.longest_code = max(self.longest_code, float(upper_norms(codes).max()))

    def best(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the float32 products of a query [1,D] with its `count` best vectors and their rows [1,count],
        descending, and an upper bound on its products with all others [1]."""
        scaled_query = query.astype(np.float64) * self.scale
        step = np.abs(scaled_query).max() / INT8
        codes = np.rint(scaled_query / (step or np.inf))
        scores, rows = self._nearest(codes.astype(np.float32), min(OVER * count, len(self.vectors)))
        products = np.vecdot(self.vectors[rows[0]], query)[None]  # BLAS's threads would still spin during the next step
        order = np.argsort(-products, axis=1)
        sorted_products = np.take_along_axis(products, order, axis=1)
        bound = sorted_products[:, count:].max(axis=1, initial=-np.inf)
        if rows.shape[1] < len(self.vectors):
            norm, dimension = upper_norms(query), query.shape[1]
            loss = norm * self.max_error + np.linalg.norm(scaled_query - step * codes) * self.longest_code
            above = step * scores[:, -1].astype(np.float64) + loss
            # Where FAISS adds up in float32, and for the float64 here.
            above += rounding_error(dimension, norm, self.longest) + 2 * dimension * UNIT * loss
            bound = np.maximum(bound, rounded_up(above))
        return sorted_products[:, :count], np.take_along_axis(rows, order, axis=1)[:, :count], bound

    def _nearest(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Search in this thread alone: FAISS has no more work for one query, and other threads would spin into the next
        step."""
        threads = self.faiss.omp_get_max_threads()
        self.faiss.omp_set_num_threads(1)
        try:
            scores, rows = self.index.search(query, count)
        finally:
            self.faiss.omp_set_num_threads(threads)
        return scores, rows
