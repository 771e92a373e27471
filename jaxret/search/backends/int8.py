"""Vectors in int8, kept together with the same vectors in float32, for single queries. Searching for one query takes as
long as reading the vectors, and int8 has a quarter of the bytes.

With a scale for each dimension, s_j = max |d_j| / 127, a vector d becomes z_j = rint(d_j / s_j), which represents d'_j
= z_j s_j. A query becomes w_j = rint(q_j s_j / t), with t = max |q_j s_j| / 127. The errors e = d - d' and r_j = q_j
s_j - t w_j are measured. With E and Z, the largest |e| and |z| of any vector, Cauchy-Schwarz gives

    q.d = q.d' + q.e = t w.z + r.z + q.e <= t w.z + |r| Z + |q| E

so no vector that FAISS leaves out has a product above this bound with the lowest w.z that it returns. The products of
the vectors that it returns are computed again in float32. (With AVX instructions for bytes, FAISS rounds a query of
this index to int8 without a scale. This does not change integers from -127 to 127, so w.z is exact.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.search.backends.precision import INT8, rounded_up
from jaxret.search.rounding import TINY, UNIT, rounding_error, upper_norms

ROWS_AT_ONCE = 8192  # vectors that are rounded at a time
CANDIDATE_FACTOR = 4  # candidates for each requested vector: random vectors need as many for a proof
MOST_CANDIDATES = 1024  # if more candidates are needed, float32 is as fast


class Quantized:
    """Vectors [N,D] float32, and the same vectors in int8."""

    def __init__(self, faiss: Any, vectors: np.ndarray) -> None:
        self.faiss, self.vectors = faiss, vectors
        parts, dimension = range(0, len(vectors), ROWS_AT_ONCE), vectors.shape[1]
        largest = np.max([np.abs(vectors[start : start + ROWS_AT_ONCE]).max(axis=0) for start in parts], axis=0)
        self.scale = largest / np.float32(INT8)
        self.scale[self.scale < TINY] = 0  # a processor may take such a number for 0
        divisors = np.where(self.scale, self.scale, np.inf)
        kind = faiss.ScalarQuantizer.QT_8bit_direct_signed  # codes are the numbers themselves: no training
        self.index = faiss.IndexScalarQuantizer(dimension, kind, faiss.METRIC_INNER_PRODUCT)
        self.index.is_trained = True
        self.max_error = self.longest = self.longest_code = 0.0  # the largest |e|, |d'|, |z|
        for start in parts:
            part = vectors[start : start + ROWS_AT_ONCE]
            codes = np.rint(part / divisors)
            self.index.add(codes)
            lossy_vectors, norms = codes * self.scale, upper_norms(part)
            # 4 * UNIT * norms: codes * scale and the difference are rounded, each by at most UNIT times their size.
            self.max_error = max(self.max_error, float((upper_norms(part - lossy_vectors) + 4 * UNIT * norms).max()))
            self.longest = max(self.longest, float(upper_norms(lossy_vectors).max()) * (1 + 2 * UNIT))
            self.longest_code = max(self.longest_code, float(upper_norms(codes).max()))

    def best(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the best vectors for a query [1,D].

        Returns:
            The `count` highest float32 products [1,count], descending; the rows of their vectors [1,count]; an upper
            bound of the products with all other vectors [1].
        """
        scaled_query = query.astype(np.float64) * self.scale
        step = np.abs(scaled_query).max() / INT8
        codes = np.rint(scaled_query / (step or np.inf))
        scores, rows = self._nearest(codes.astype(np.float32), min(CANDIDATE_FACTOR * count, len(self.vectors)))
        # Not BLAS: its idle threads would keep cores busy during the next step.
        products = np.vecdot(self.vectors[rows[0]], query)[None]
        order = np.argsort(-products, axis=1)
        sorted_products = np.take_along_axis(products, order, axis=1)
        bound = sorted_products[:, count:].max(axis=1, initial=-np.inf)
        if rows.shape[1] < len(self.vectors):
            norm, dimension = upper_norms(query), query.shape[1]
            loss = norm * self.max_error + np.linalg.norm(scaled_query - step * codes) * self.longest_code
            above = step * scores[:, -1].astype(np.float64) + loss
            # Rounding errors of FAISS's float32 sums, and of the float64 numbers of this function.
            above += rounding_error(dimension, norm, self.longest) + 2 * dimension * UNIT * loss
            bound = np.maximum(bound, rounded_up(above))
        return sorted_products[:, :count], np.take_along_axis(rows, order, axis=1)[:, :count], bound

    def _nearest(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Search with one thread. One query does not occupy more, and idle threads of FAISS would keep cores busy
        during the next step."""
        threads = self.faiss.omp_get_max_threads()
        self.faiss.omp_set_num_threads(1)
        try:
            scores, rows = self.index.search(query, count)
        finally:
            self.faiss.omp_set_num_threads(threads)
        return scores, rows
