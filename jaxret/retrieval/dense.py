"""Exact search: the k best documents of every query, the same ids and scores on every backend and every shard size.

The score of a document is the float32 nearest to q.d, the highest over its V vectors; ties go to the lower row.
A backend proposes k and some more candidates in its own float32; they are scored again in float64; and a query is
done when no document that was left out can reach its k-th score, rounding errors included. Others look deeper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from jaxret.retrieval.backends import BLOCK_ROWS, QUERY_ROWS, Backend, rounding_error, upper_norms
from jaxret.retrieval.proof import Candidates, SearchResult, empty_candidates, search_until_proven

PAIR_NUMBERS = 2**18  # numbers of one float64 batch of products: fits the cache of a core


@runtime_checkable
class Corpus(Protocol):
    """Vectors in shards; a ShardSet is one."""

    @property
    def total_rows(self) -> int: ...
    @property
    def vectors_per_row(self) -> int: ...
    @property
    def dimension(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]: ...


@dataclass(frozen=True)
class InMemory:
    """Blocks of vectors [rows,V,D] (float32 or float16) as a corpus."""

    blocks: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        shapes = sorted({block.shape[1:] for block in self.blocks})
        if len(shapes) != 1 or len(shapes[0]) != 2 or self.total_rows == 0:
            raise ValueError(f"blocks of vectors must be [rows,V,D] with one V and D and at least a row, got {shapes}")

    @property
    def total_rows(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def vectors_per_row(self) -> int:
        return int(self.blocks[0].shape[1])

    @property
    def dimension(self) -> int:
        return int(self.blocks[0].shape[2])

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        first = 0
        for block in self.blocks:
            yield first, block
            first += len(block)


def search(
    queries: Float[np.ndarray, "Q D"],
    shards: Corpus | Sequence[np.ndarray],
    k: int,
    backend: Backend,
    progress: bool = False,
) -> SearchResult:
    """Finds the k best documents of float32 queries [Q,D] in `shards`, a ShardSet or a list of blocks [rows,V,D].

    Reads shard by shard; memory grows with Q x k and one shard. Raises ValueError for a NaN, an infinity, or vectors
    of another dimension, naming the row; RuntimeError if the backend loses documents.
    """
    corpus: Corpus = InMemory(shards) if isinstance(shards, Sequence) else shards
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    if queries.dtype != np.float32 or queries.ndim != 2 or queries.shape[1] != corpus.dimension:
        raise ValueError(
            f"queries are {queries.dtype} {list(queries.shape)}; the documents want float32 [Q,{corpus.dimension}]: "
            "were both encoded with the same checkpoint?"
        )
    if backend.max_rows is not None and corpus.vectors_per_row > backend.max_rows:
        raise ValueError(
            f"{corpus.vectors_per_row} vectors a document are more than the {backend.max_rows} that "
            f"{backend.name} can return: choose faiss-cpu or xla"
        )
    queries = np.ascontiguousarray(queries)
    norms = upper_norms(queries)
    if not np.isfinite(norms).all():
        raise ValueError(f"query {int(np.argmin(np.isfinite(norms)))} has a NaN, an infinity or a number too large")

    def look(part: np.ndarray, depth: int) -> tuple[Candidates, np.ndarray]:
        candidates, largest_norm = _candidates(queries[part], corpus, depth, backend, progress)
        _score_exactly(candidates, queries[part], norms[part], largest_norm, corpus)
        return candidates, rounding_error(corpus.dimension, norms[part], largest_norm)

    return search_until_proven(look, len(queries), corpus.total_rows, k, backend.description)


def _candidates(
    queries: np.ndarray, corpus: Corpus, depth: int, backend: Backend, progress: bool
) -> tuple[Candidates, float]:
    """The `depth` best documents of each query in the backend's float32, and the largest norm of any vector."""
    candidates = empty_candidates(len(queries), depth)
    largest_norm = 0.0
    size = _block_documents(corpus, depth, backend)
    with tqdm(total=corpus.total_rows, unit="doc", unit_scale=True, desc="search", disable=not progress) as bar:
        for shard_row, shard in corpus:
            for start in range(0, len(shard), size):
                block = np.ascontiguousarray(shard[start : start + size], np.float32)
                largest_norm = max(largest_norm, _largest_norm(block, shard_row + start))
                top = backend.load(block)
                for first in range(0, len(queries), QUERY_ROWS):
                    part = slice(first, first + QUERY_ROWS)
                    candidates.add(part, top(queries[part], depth), shard_row + start)
                bar.update(len(block))
    return candidates, largest_norm


def _block_documents(corpus: Corpus, depth: int, backend: Backend) -> int:
    """Documents to give the backend at a time: few enough that what it may return of each block adds up to depth."""
    rows = BLOCK_ROWS
    if backend.max_rows is not None:
        there = min(rows, corpus.total_rows * corpus.vectors_per_row)
        rows = min(rows, max(backend.max_rows, there * backend.max_rows // (depth * corpus.vectors_per_row)))
    return max(1, rows // corpus.vectors_per_row)


def _largest_norm(block: np.ndarray, first_row: int) -> float:
    norms = upper_norms(block.reshape(-1, block.shape[-1]))
    largest = float(norms.max())  # a NaN wins
    if not math.isfinite(largest):
        row = first_row + int(np.argmin(np.isfinite(norms))) // block.shape[1]
        raise ValueError(
            f"document row {row} has a NaN, an infinity or a number too large in its vectors: "
            "the checkpoint or the encoding went wrong; encode again"
        )
    return largest


def _score_exactly(
    candidates: Candidates, queries: np.ndarray, norms: np.ndarray, largest_norm: float, corpus: Corpus
) -> None:
    """Replaces the backend's scores by exact ones and sorts the candidates by the tie rule, in place.

    A float64 sum may be off by gamma_D |q||d|. Where that leaves two float32 numbers possible, the products (exact in
    float64) are summed by math.fsum, so that the result is a function of the two vectors alone.
    """
    depth = candidates.rows.shape[1]
    flat_rows = candidates.rows.ravel()
    flat_scores = np.full(flat_rows.shape, -np.inf, np.float32)
    order = np.argsort(flat_rows, kind="stable")  # corpus order: each shard is read once
    sorted_rows = flat_rows[order]
    wide_queries = queries.astype(np.float64)
    errors = 2 * corpus.dimension * 2.0**-53 * norms * largest_norm
    step = max(1, PAIR_NUMBERS // (corpus.vectors_per_row * corpus.dimension))
    for first_row, shard in corpus:
        begin, end = np.searchsorted(sorted_rows, [first_row, first_row + len(shard)])
        for start in range(begin, end, step):
            pairs = slice(start, min(start + step, end))
            query = order[pairs] // depth
            vectors = np.asarray(shard[sorted_rows[pairs] - first_row], np.float64)  # [P,V,D]
            score = np.vecdot(vectors, wide_queries[query][:, None]).max(axis=1)
            error = errors[query]
            exact = (score + error).astype(np.float32)
            for i in np.flatnonzero(exact != (score - error).astype(np.float32)):
                exact[i] = max(math.fsum(products) for products in vectors[i] * wide_queries[query[i]])
            flat_scores[order[pairs]] = exact + np.float32(0)  # -0 becomes 0
    scores = flat_scores.reshape(candidates.rows.shape)
    by_rule = np.lexsort((candidates.rows, -scores), axis=1)
    candidates.scores[:] = np.take_along_axis(scores, by_rule, axis=1)
    candidates.rows[:] = np.take_along_axis(candidates.rows, by_rule, axis=1)
