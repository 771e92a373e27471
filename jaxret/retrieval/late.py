"""Exact search where every text has its own number of vectors (ColBERT): sum over query vectors of the maximum over
document vectors; with one query vector, the maximum alone.

The score of a document is the float32 nearest to sum_u max_k q_u . v_k, each product rounded to float64 once; ties go
to the lower row. XLA proposes candidates in float32 on JAX's device, block by block; the rest is as in `search.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxret.retrieval.backends import BLOCK_ROWS, QUERY_ROWS, UNIT, Found, rounding_error, upper_norms
from jaxret.retrieval.proof import Candidates, SearchResult, empty_candidates, search_until_proven
from jaxret.runs.embedder import plan_batches
from jaxret.types import Ragged


@runtime_checkable
class Lists(Protocol):
    """Lists of vectors in shards; a ragged ShardSet is one."""

    @property
    def total_rows(self) -> int: ...
    @property
    def dimension(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, Ragged]]: ...


@dataclass(frozen=True)
class ListsInMemory:
    """Ragged as a corpus of several shards."""

    blocks: tuple[Ragged, ...]

    @property
    def total_rows(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def dimension(self) -> int:
        return self.blocks[0].flat.shape[1]

    def __iter__(self) -> Iterator[tuple[int, Ragged]]:
        first = 0
        for block in self.blocks:
            yield first, block
            first += len(block)


def search_lists(queries: Ragged, corpus: Lists, k: int, progress: bool = False) -> SearchResult:
    """The k best documents of float32 queries, each a list of one or more vectors.

    Reads shard by shard; what is on disk without padding is padded a block at a time, documents of like length
    together. The queries are held padded. Raises ValueError for a NaN, an infinity, or vectors of another dimension,
    naming the row.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    if queries.flat.dtype != np.float32 or queries.flat.shape[1] != corpus.dimension:
        raise ValueError(
            f"queries are {queries.flat.dtype} of {queries.flat.shape[1]} numbers; the documents want float32 of "
            f"{corpus.dimension}: were both encoded with the same checkpoint?"
        )
    norms = upper_norms(queries.flat)
    if not np.isfinite(norms).all():
        place = int(np.argmin(np.isfinite(norms)))
        query = int(np.searchsorted(queries.offsets, place, "right")) - 1
        raise ValueError(f"query {query} has a NaN, an infinity or a number too large")

    def look(part: np.ndarray, depth: int) -> tuple[Candidates, np.ndarray]:
        chosen = queries.take(part)
        candidates, largest_norm = _candidates(chosen, corpus, depth, progress)
        sizes = [upper_norms(chosen[i]) for i in range(len(chosen))]
        _score_exactly(candidates, chosen, sizes, largest_norm, corpus)
        return candidates, np.array([score_error(corpus.dimension, size, largest_norm) for size in sizes])

    device = jax.local_devices()[0].device_kind
    return search_until_proven(look, len(queries), corpus.total_rows, k, f"XLA (jax {jax.__version__}) on {device}")


def score_error(dimension: int, query_norms: np.ndarray, largest_norm: float, unit: float = UNIT) -> float:
    """How far a computed sum of maxima may be from the exact one: each product's error, and that of their sum."""
    products = rounding_error(dimension, query_norms, largest_norm).sum() * (unit / UNIT)
    return float(products + 2 * len(query_norms) * unit * (query_norms.sum() * largest_norm + products))


def self_check_lists() -> None:
    """Scores small random lists and compares with float64, as `index.self_check` does for single vectors. Raises
    RuntimeError if a score is further from the exact one than the proof allows."""
    random = np.random.default_rng(0)
    for n_queries, users, n, n_vectors, dimension in ((1, 1, 50, 3, 8), (4, 8, 60, 5, 128), (2, 32, 40, 20, 768)):
        numbers = random.standard_normal((n_queries * users + n * n_vectors, dimension), dtype=np.float32)
        numbers[[0, -1]] = 1 + 2.0**-12  # the last bits are those that TF32 or bfloat16 would lose
        queries = Ragged(numbers[: n_queries * users], np.arange(n_queries + 1) * users)
        documents = Ragged(numbers[n_queries * users :], np.arange(n + 1) * n_vectors)
        q, exists = queries.padded(np.arange(n_queries), 2 * users)
        vectors, mask = (jnp.asarray(x) for x in documents.padded(_rows(np.arange(n), n + 4), n_vectors + 1))
        found = _top(q, exists, vectors, mask, n, n)
        products = queries.flat.astype(np.float64) @ documents.flat.astype(np.float64).T
        best = products.reshape(n_queries, users, n, n_vectors).max(axis=-1).sum(axis=1)
        largest = float(upper_norms(documents.flat).max())
        norms = upper_norms(queries.flat).reshape(n_queries, users)
        error = np.array([score_error(dimension, row, largest) for row in norms])[:, None]
        wrong = np.abs(found.scores - np.take_along_axis(best, found.documents, axis=1)) > error
        if wrong.any() or (np.sort(found.documents, axis=1) != np.arange(n)).any():
            raise RuntimeError(
                f"XLA on {jax.local_devices()[0].device_kind} is less exact than float32 ({n_queries} x {users} query "
                f"vectors, {n} documents of {n_vectors} x {dimension}): is TF32 or bfloat16 forced?"
            )


def _candidates(queries: Ragged, corpus: Lists, depth: int, progress: bool) -> tuple[Candidates, float]:
    candidates = empty_candidates(len(queries), depth)
    longest = int(queries.lengths.max())
    width = 1 << (longest - 1).bit_length()  # few sizes, so few programs are compiled
    rows_at_once = max(1, QUERY_ROWS // width)
    parts = [
        np.arange(start, min(start + rows_at_once, len(queries))) for start in range(0, len(queries), rows_at_once)
    ]
    padded = [queries.padded(_rows(part, min(rows_at_once, _round_up(len(part)))), width) for part in parts]
    largest_norm = 0.0
    with tqdm(total=corpus.total_rows, unit="doc", unit_scale=True, desc="search", disable=not progress) as bar:
        for first_row, shard in corpus:
            for rows, size, length in plan_batches(shard.lengths, BLOCK_ROWS, 1):
                rows = np.sort(rows)
                block = shard.take(rows).astype(np.float32)
                largest_norm = max(largest_norm, _largest_norm(block, first_row + rows))
                vectors, mask = (jnp.asarray(x) for x in block.padded(_rows(np.arange(len(rows)), size), length))
                for part, (q, exists) in zip(parts, padded, strict=True):
                    found = _top(q, exists, vectors, mask, min(depth, len(rows)), len(rows))
                    candidates.add(slice(part[0], part[-1] + 1), _global(found, len(part), rows), first_row)
                bar.update(len(rows))
    return candidates, largest_norm


def _top(q: np.ndarray, exists: np.ndarray, vectors: jax.Array, mask: jax.Array, k: int, documents: int) -> Found:
    """The k best of a block's `documents`, by their place in it."""
    size = vectors.shape[0]
    scores, place = (np.asarray(x) for x in _xla_top(q, exists, vectors, mask, min(_round_up(k), size)))
    bound = scores[:, k - 1] if k < documents else np.full(len(scores), -np.inf, np.float32)
    # Padded documents score -inf and come last: no product of vectors that passed `upper_norms` overflows.
    assert (place[:, :k] < documents).all()
    return Found(scores[:, :k], place[:, :k].astype(np.int64), bound)


def _rows(rows: np.ndarray, size: int) -> np.ndarray:
    """The rows, and empty ones (-1) up to `size`."""
    return np.concatenate([rows, np.full(size - len(rows), -1)])


def _round_up(k: int) -> int:
    return 1 << (k - 1).bit_length()


@partial(jax.jit, static_argnums=4)
def _xla_top(
    queries: jax.Array, exists: jax.Array, vectors: jax.Array, mask: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    products = jnp.einsum("qud,nvd->qunv", queries, vectors, precision=jax.lax.Precision.HIGHEST)
    best = jnp.max(jnp.where(mask, products, -jnp.inf), axis=-1)  # [Q,U,N]
    scores = jnp.sum(jnp.where(exists[..., None], best, 0.0), axis=1)
    top, places = jax.lax.top_k(scores, k)
    return top, places


def _global(found: Found, queries: int, rows: np.ndarray) -> Found:
    """Places in a block -> rows of the shard, for the queries that are no padding."""
    return Found(found.scores[:queries], rows[found.documents[:queries]], found.bound[:queries])


def _largest_norm(block: Ragged, rows: np.ndarray) -> float:
    norms = upper_norms(block.flat)
    largest = float(norms.max())
    if not math.isfinite(largest):
        place = int(np.argmin(np.isfinite(norms)))
        row = rows[int(np.searchsorted(block.offsets, place, "right")) - 1]
        raise ValueError(
            f"document row {row} has a NaN, an infinity or a number too large in its vectors: "
            "the checkpoint or the encoding went wrong; encode again"
        )
    return largest


def _score_exactly(
    candidates: Candidates, queries: Ragged, norms: list[np.ndarray], largest_norm: float, corpus: Lists
) -> None:
    """Replaces the float32 scores by exact ones and sorts the candidates by the tie rule, in place."""
    scores = np.full(candidates.rows.shape, -np.inf, np.float32)
    for first_row, shard in corpus:
        here = (candidates.rows >= first_row) & (candidates.rows < first_row + len(shard))
        for i in np.flatnonzero(here.any(axis=1)):
            documents = shard.take(candidates.rows[i, here[i]] - first_row)
            query, vectors = queries[i].astype(np.float64), documents.flat.astype(np.float64)
            best = np.maximum.reduceat(vectors @ query.T, documents.offsets[:-1])  # [documents,U]
            score = best.sum(axis=1)
            error = score_error(corpus.dimension, norms[i], largest_norm, 2.0**-53)
            exact = (score + error).astype(np.float32)
            for j in np.flatnonzero(exact != (score - error).astype(np.float32)):
                exact[j] = exact_score(query, documents[j].astype(np.float64))
            scores[i, here[i]] = exact + np.float32(0)  # -0 becomes 0
    by_rule = np.lexsort((candidates.rows, -scores), axis=1)
    candidates.scores[:] = np.take_along_axis(scores, by_rule, axis=1)
    candidates.rows[:] = np.take_along_axis(candidates.rows, by_rule, axis=1)


def exact_score(query: np.ndarray, document: np.ndarray) -> np.float32:
    """sum_u max_k q_u . v_k of float64 arrays that hold float32 numbers [U,D] and [V,D]: products of float32 numbers
    are exact in float64, and `math.fsum` rounds their sum once."""
    return np.float32(math.fsum(max(math.fsum(products) for products in document * vector) for vector in query))
