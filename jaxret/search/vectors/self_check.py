"""A check that a backend computes on this machine as exactly as the proof requires, before it is used."""

from __future__ import annotations

import numpy as np

from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.precision import compress, losses
from jaxret.search.backends.select import Backend
from jaxret.search.proof import BlockHits
from jaxret.search.rounding import UNIT, rounding_error, sum_error, upper_norms
from jaxret.types import Ragged


def self_check(backend: Backend, multi_vector: bool = False) -> None:
    """Compare searches of small random blocks with float64. Raises RuntimeError if they differ too much.

    The proof requires that every score differs from the exact score by at most the rounding error (below float32: that
    it exceeds it by at most the loss of precision), that no passage is returned twice, and that the scores of all other
    passages are at most the bound. Some numbers have last bits that TF32 or bfloat16 would lose.

    `multi_vector` is whether lists of vectors are searched.
    """
    random = np.random.default_rng(0)
    (_check_lists if multi_vector else _check_vectors)(backend, random)


def _check_vectors(backend: Backend, random: np.random.Generator) -> None:
    for n_queries, n_passages, n_vectors, dimension, k in (
        (1, 300, 1, 8, 300),  # few dimensions give a small tolerance; k = N requests all passages
        (65, 600, 1, 768, 10),  # a usual dimension, and enough queries for the large tiles of the GPU kernel
        (1, 600, 1, 768, 10),  # the small tiles of the GPU kernel
        (1, 200, 3, 64, 25),  # several vectors for each passage
    ):
        queries = random.standard_normal((n_queries, dimension), dtype=np.float32)
        vectors = random.standard_normal((n_passages, n_vectors, dimension), dtype=np.float32)
        vectors[n_passages // 2 :] = vectors[: n_passages - n_passages // 2]  # every passage has a duplicate
        vectors[7], queries[0] = 1 + 2.0**-12, 1 + 2.0**-12
        exact = np.einsum("qd,nvd->qnv", queries.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
        flat = vectors.reshape(-1, dimension)
        error = rounding_error(dimension, upper_norms(queries), float(upper_norms(flat).max()))
        error *= backend.precision.unit(dimension) / UNIT
        loss = losses(compress(queries, backend.precision), compress(flat, backend.precision))
        loss = 2 * loss.reshape(n_queries, n_passages, n_vectors).max(axis=-1)
        case = f"{n_queries} queries, {n_passages} passages of {n_vectors} x {dimension}, k = {k}"
        _compare(backend, backend.load(vectors)(queries, k), exact, error, loss, k, case)


def _check_lists(backend: Backend, random: np.random.Generator) -> None:
    for n_queries, vectors_per_query, n_passages, n_vectors, dimension in (
        (1, 1, 50, 3, 8),
        (4, 8, 60, 5, 128),
        (2, 32, 40, 20, 768),
    ):
        size = n_queries * vectors_per_query + n_passages * n_vectors
        numbers = random.standard_normal((size, dimension), dtype=np.float32)
        numbers[[0, -1]] = 1 + 2.0**-12
        queries = Ragged(numbers[: n_queries * vectors_per_query], np.arange(n_queries + 1) * vectors_per_query)
        passages = Ragged(numbers[n_queries * vectors_per_query :], np.arange(n_passages + 1) * n_vectors)
        rows = np.append(np.arange(n_passages), np.full(64 - n_passages, -1))  # padded passages, too
        block = PaddedLists(*passages.padded(rows, n_vectors + 1), n_passages)
        hits = backend.load(block)(queries, n_passages)
        products = queries.flat.astype(np.float64) @ passages.flat.astype(np.float64).T
        shape = (n_queries, vectors_per_query, n_passages, n_vectors)
        exact = products.reshape(shape).max(axis=-1).sum(axis=1)
        vectors = [compress(lists.flat, backend.precision) for lists in (queries, passages)]
        loss = 2 * losses(*vectors).reshape(shape).max(axis=-1).sum(axis=1)
        largest = float(upper_norms(passages.flat).max())
        norms = upper_norms(queries.flat).reshape(n_queries, vectors_per_query)
        error = np.array([sum_error(dimension, row, largest, backend.precision.unit(dimension)) for row in norms])
        case = f"{n_queries} x {vectors_per_query} query vectors, {n_passages} passages of {n_vectors} x {dimension}"
        _compare(backend, hits, exact, error, loss, n_passages, case)


def _compare(
    backend: Backend, hits: BlockHits, exact: np.ndarray, error: np.ndarray, loss: np.ndarray, k: int, case: str
) -> None:
    """Raise RuntimeError if a backend's hits are not as exact as the proof requires.

    Args:
        backend: the backend.
        hits: the result of the backend.
        exact: exact scores of all passages, float64 [Q,N].
        error: largest allowed error of a score for each query [Q].
        loss: largest allowed excess of a score beyond `error`, from the loss of precision [Q,N].
        k: number of requested passages.
        case: description of the case, for the message.
    """
    n_queries, n = exact.shape
    low = exact - error[:, None]
    high = exact + error[:, None] + loss
    problem = ""
    if hits.rows.shape != (n_queries, k) or hits.rows.min() < 0 or hits.rows.max() >= n:
        problem = f"returned passages of shape {hits.rows.shape} outside 0 to {n - 1}"
    elif any(len(set(row)) != k for row in hits.rows.tolist()):
        problem = "returned a passage twice"
    elif (np.diff(hits.scores, axis=1) > 0).any():
        problem = "returned scores that are not descending"
    elif not all(
        (sign * hits.scores <= sign * np.take_along_axis(limit, hits.rows, axis=1)).all()
        for sign, limit in ((1, high), (-1, low))
    ):
        problem = f"is less exact than {backend.precision.name}: is another precision forced (NVIDIA_TF32_OVERRIDE)?"
    else:
        left_out = exact.copy()
        np.put_along_axis(left_out, hits.rows, -np.inf, axis=1)
        if (left_out.max(axis=1) > hits.bound.astype(np.float64) + error).any():
            problem = "left out a passage that scores above its bound"
    if problem:
        raise RuntimeError(f"search backend {backend.description} {problem} ({case}): choose another backend")
