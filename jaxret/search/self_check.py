"""A check, before a backend is used, that it computes on this machine as the proof requires."""

from __future__ import annotations

import numpy as np

from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.precision import compress, losses
from jaxret.search.backends.select import Backend
from jaxret.search.proof import BlockHits
from jaxret.search.rounding import UNIT, rounding_error, sum_error, upper_norms
from jaxret.types import Ragged


def self_check(backend: Backend, lists: bool = False) -> None:
    """Search small random blocks (with `lists`, of lists) and compare with float64. Raises RuntimeError if anything
    differs.

    The proof requires that every score is within the rounding error of the exact one (below float32: above it, by no
    more than the loss of precision explains), that no passage comes twice, and that no passage left out is above the
    bound. Some numbers have last bits that TF32 or bfloat16 would lose.
    """
    random = np.random.default_rng(0)
    (_check_lists if lists else _check_vectors)(backend, random)


def _check_vectors(backend: Backend, random: np.random.Generator) -> None:
    # Q, N, V, D, k: few dimensions make the tolerance tight; many are what is searched, by as many queries as a GPU's
    # kernel takes at a time; k = N wants everything.
    for n_queries, n, n_vectors, dimension, k in (
        (1, 300, 1, 8, 300),
        (65, 600, 1, 768, 10),
        (1, 600, 1, 768, 10),
        (1, 200, 3, 64, 25),
    ):
        queries = random.standard_normal((n_queries, dimension), dtype=np.float32)
        vectors = random.standard_normal((n, n_vectors, dimension), dtype=np.float32)
        vectors[n // 2 :] = vectors[: n - n // 2]  # every passage twice
        vectors[7], queries[0] = 1 + 2.0**-12, 1 + 2.0**-12
        exact = np.einsum("qd,nvd->qnv", queries.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
        flat = vectors.reshape(-1, dimension)
        error = rounding_error(dimension, upper_norms(queries), float(upper_norms(flat).max()))
        error *= backend.precision.unit(dimension) / UNIT
        loss = losses(compress(queries, backend.precision), compress(flat, backend.precision))
        loss = 2 * loss.reshape(n_queries, n, n_vectors).max(axis=-1)
        case = f"{n_queries} queries, {n} passages of {n_vectors} x {dimension}, k = {k}"
        _compare(backend, backend.load(vectors)(queries, k), exact, error, loss, k, case)


def _check_lists(backend: Backend, random: np.random.Generator) -> None:
    for n_queries, users, n, n_vectors, dimension in ((1, 1, 50, 3, 8), (4, 8, 60, 5, 128), (2, 32, 40, 20, 768)):
        numbers = random.standard_normal((n_queries * users + n * n_vectors, dimension), dtype=np.float32)
        numbers[[0, -1]] = 1 + 2.0**-12
        queries = Ragged(numbers[: n_queries * users], np.arange(n_queries + 1) * users)
        passages = Ragged(numbers[n_queries * users :], np.arange(n + 1) * n_vectors)
        rows = np.append(np.arange(n), np.full(64 - n, -1))  # padding in every direction
        block = PaddedLists(*passages.padded(rows, n_vectors + 1), n)
        hits = backend.load(block)(queries, n)
        products = queries.flat.astype(np.float64) @ passages.flat.astype(np.float64).T
        shape = (n_queries, users, n, n_vectors)
        exact = products.reshape(shape).max(axis=-1).sum(axis=1)
        short = [compress(lists.flat, backend.precision) for lists in (queries, passages)]
        loss = 2 * losses(*short).reshape(shape).max(axis=-1).sum(axis=1)
        largest = float(upper_norms(passages.flat).max())
        norms = upper_norms(queries.flat).reshape(n_queries, users)
        error = np.array([sum_error(dimension, row, largest, backend.precision.unit(dimension)) for row in norms])
        case = f"{n_queries} x {users} query vectors, {n} passages of {n_vectors} x {dimension}"
        _compare(backend, hits, exact, error, loss, n, case)


def _compare(
    backend: Backend, hits: BlockHits, exact: np.ndarray, error: np.ndarray, loss: np.ndarray, k: int, case: str
) -> None:
    """Raise RuntimeError if hits differ from exact scores of all passages, float64 [Q,N], by more than `error` [Q], or
    above them by more than error and `loss` [Q,N]."""
    n_queries, n = exact.shape
    low = exact - error[:, None]
    high = exact + error[:, None] + loss
    wrong = ""
    if hits.rows.shape != (n_queries, k) or hits.rows.min() < 0 or hits.rows.max() >= n:
        wrong = f"returned passages of shape {hits.rows.shape} outside 0 to {n - 1}"
    elif any(len(set(row)) != k for row in hits.rows.tolist()):
        wrong = "returned a passage twice"
    elif (np.diff(hits.scores, axis=1) > 0).any():
        wrong = "returned scores that are not descending"
    elif not all(
        (sign * hits.scores <= sign * np.take_along_axis(limit, hits.rows, axis=1)).all()
        for sign, limit in ((1, high), (-1, low))
    ):
        wrong = f"is less exact than {backend.precision.name}: is another precision forced (NVIDIA_TF32_OVERRIDE)?"
    else:
        left_out = exact.copy()
        np.put_along_axis(left_out, hits.rows, -np.inf, axis=1)
        if (left_out.max(axis=1) > hits.bound.astype(np.float64) + error).any():
            wrong = "left out a passage that scores above its bound"
    if wrong:
        raise RuntimeError(f"search backend {backend.description} {wrong} ({case}): choose another backend")
