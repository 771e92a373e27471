"""Exact search of sparse vectors.

All weights are above 0, so a passage scores exactly 0 if it has no word of the query. A backend (scipy on a CPU, XLA on
other devices) finds the best of the other passages by float32 scores. These candidates are scored again, and the result
is proven complete, as in every exact search (`exact.py`, `proof.py`). If fewer than k passages have a word of the
query, the lowest rows with score 0 follow them, according to the tie rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from jaxret.parallel.progress import COMPILATION, Progress
from jaxret.search.backends.sparse_scipy import ScipyLists, as_csr
from jaxret.search.backends.sparse_xla import XlaLists
from jaxret.search.proof import (
    MARGIN,
    BlockHits,
    Candidates,
    SearchResult,
    empty_candidates,
    first_depth,
    search_until_proven,
)
from jaxret.search.rounding import UNIT, rounding_error
from jaxret.search.vectors.exact import score_exactly
from jaxret.search.vectors.full_scan import scan_all
from jaxret.search.vectors.in_memory import MEMORY_BYTES, require_finite_vectors
from jaxret.search.vectors.single_vector import query_spans
from jaxret.search.vectors.vector_corpus import NamedRows
from jaxret.types import LONGEST_NORM, SparseRows

BLOCK_PASSAGES = 65_536  # largest number of passages of a block
# Largest number of words of a block that is padded to its longest passage: half a GiB on a device. With an untrained
# MLM head, a passage has half of the vocabulary.
BLOCK_WORDS = 2**26
POSTING_BYTES = 12  # bytes of a word of a passage in memory: a row and a float64

SparseBlockSearch: TypeAlias = Callable[[SparseRows, int], BlockHits]  # arguments: queries, k; padding scores -inf


@runtime_checkable
class SparseBackend(Protocol):
    """A library that multiplies sparse vectors. The errors of its scores are at most `rounding_error` of float32
    sums."""

    @property
    def description(self) -> str:
        """Return a line with library, version, device, and the reason for the choice."""
        ...

    def load(self, block: SparseRows) -> SparseBlockSearch:
        """Return a function that finds the best passages of a block among those that share a word with a query."""
        ...


SPARSE_BACKENDS: dict[str, Callable[[str], SparseBackend]] = {"scipy": ScipyLists, "xla": XlaLists}


def sparse_backend(name: str = "auto") -> SparseBackend:
    """Return the backend with a name: scipy, xla, or auto (scipy if JAX runs on a CPU, else xla).

    Raises ValueError for another name.
    """
    if name == "auto":
        reason = f"auto: JAX runs on {jax.default_backend()}"
        return ScipyLists(reason) if jax.default_backend() == "cpu" else XlaLists(reason)
    if name not in SPARSE_BACKENDS:
        raise ValueError(f"backend={name}: sparse vectors are searched by auto, {' or '.join(SPARSE_BACKENDS)}")
    return SPARSE_BACKENDS[name]("as requested")


def check_sparse(backend: SparseBackend) -> None:
    """Compare a search of a small random block with float64. Raises RuntimeError if an error exceeds the allowed
    error."""
    random = np.random.default_rng(0)
    dense = [np.where(random.random((n, 64)) < 0.3, random.random((n, 64)), 0).astype(np.float32) for n in (5, 200)]
    queries, passages = map(SparseRows.from_dense, dense)
    hits = backend.load(passages)(queries, 20)
    exact = queries.flat.astype(np.float64) @ passages.flat.astype(np.float64).T
    error = SparseQueries(queries).errors(float(sparse_norms(passages).max()), UNIT)
    if (np.abs(np.take_along_axis(exact, hits.rows, axis=1) - hits.scores) > error[:, None]).any():
        raise RuntimeError(f"search backend {backend.description} is less exact than float32: choose another backend")
    np.put_along_axis(exact, hits.rows, -np.inf, axis=1)
    if (exact.max(axis=1) > hits.bound + error).any():
        raise RuntimeError(f"search backend {backend.description} left out a passage that scores above its bound")


class SparseQueries:
    """Sparse queries, for shards of sparse passages (`query_vectors.ScoredQueries`)."""

    pairs_a_thread = 4096

    def __init__(self, rows: SparseRows) -> None:
        self.rows = rows
        self.norms = sparse_norms(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        return self.rows[i].astype(np.float64)

    def take(self, part: np.ndarray) -> SparseQueries:
        return SparseQueries(self.rows.take(part))

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        """Return upper bounds of the errors of scores: sums of at most as many products as a query has words."""
        words = max(1, int(self.rows.word_counts.max(initial=0)))
        return rounding_error(words, self.norms, largest_norm) * (unit / UNIT)

    def scores(self, queries: np.ndarray, shard: SparseRows, rows: np.ndarray) -> np.ndarray:
        result = np.empty(len(rows))
        for start, stop in query_spans(queries):
            result[start:stop] = as_csr(shard.take(rows[start:stop])) @ self[queries[start]][0]
        return result

    def every_score(self, shard: SparseRows, start: int, stop: int) -> np.ndarray:
        scores: np.ndarray = (as_csr(self.rows) @ as_csr(shard.part(start, stop)).T).toarray()
        return scores


class SearchableBlock(NamedTuple):
    """A block of a corpus that a backend has loaded."""

    first_row: int  # row of the block's first passage in the corpus
    rows: int  # number of rows
    search: SparseBlockSearch
    largest_norm: float  # upper bound of the norms of the passages


class InvertedLists:
    """A sparse corpus that can be searched exactly."""

    def __init__(self, corpus: NamedRows, keep_in_memory: bool = False, backend: SparseBackend | None = None) -> None:
        """Open a corpus; `keep_in_memory` keeps its lists in memory if they take at most MEMORY_BYTES."""
        self.corpus, self.backend = corpus, backend or sparse_backend()
        postings = sum(len(shard.words) for _, shard in corpus) if keep_in_memory else 0
        fits = keep_in_memory and postings * POSTING_BYTES <= MEMORY_BYTES
        self.blocks_in_memory = list(self._load_blocks()) if fits else None

    @property
    def description(self) -> str:
        return self.backend.description

    def _load_blocks(self) -> Iterator[SearchableBlock]:
        for first, shard in self.corpus:
            step = min(BLOCK_PASSAGES, max(1, BLOCK_WORDS // max(1, int(shard.word_counts.max(initial=0)))))
            for start in range(0, len(shard), step):
                block = shard.part(start, min(start + step, len(shard)))
                norms = sparse_norms(block)
                require_finite_vectors(self.corpus, first + start + np.arange(len(block)), norms)
                yield SearchableBlock(first + start, len(block), self.backend.load(block), float(norms.max()))

    def search(self, queries: SparseRows, k: int, progress: bool = False) -> SearchResult:
        """Return the k best passages of every query; score descending, then row ascending.

        Raises ValueError for k < 1, queries of another vocabulary, and weights that are negative, NaN or infinite.
        """
        require_same_vocabulary(queries, self.corpus.dimension)
        total, width = self.corpus.total_rows, min(k, self.corpus.total_rows)
        sparse_queries = SparseQueries(queries)
        if not np.isfinite(sparse_queries.norms).all():
            query = int(np.argmin(np.isfinite(sparse_queries.norms)))
            raise ValueError(f"query {query} has a weight that is negative, NaN, infinite or too large")

        norm = 0.0  # largest norm of a passage

        def find(part: np.ndarray, depth: int) -> tuple[Candidates, np.ndarray, int]:
            nonlocal norm
            part_vectors = sparse_queries.take(part)
            candidates, norm = self._candidates(part_vectors, depth, progress)
            error = part_vectors.errors(norm, UNIT)
            count = score_exactly(candidates, part_vectors, norm, self.corpus, k, error)
            fill_with_zeros(candidates, width)
            return candidates, error, count

        def settle(part: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> int:
            return scan_all(sparse_queries.take(part), self.corpus, scores, rows, norm)

        depth = first_depth(k, 0.0, MARGIN)
        return search_until_proven(find, len(queries), total, k, self.description, depth, settle)

    def _candidates(self, queries: SparseQueries, depth: int, progress: bool) -> tuple[Candidates, float]:
        """Return the best passages among those that share a word with each query, and the largest norm of a passage."""
        candidates, largest_norm = empty_candidates(len(queries), depth), 0.0
        cause = COMPILATION if isinstance(self.backend, XlaLists) else ""
        with Progress("search", self.corpus.total_rows, "passage", progress=progress, cause=cause) as bar:
            for block in self.blocks_in_memory if self.blocks_in_memory is not None else self._load_blocks():
                candidates.add(slice(None), block.search(queries.rows, depth), block.first_row)
                largest_norm = max(largest_norm, block.largest_norm)
                bar.update(block.rows)
        candidates.rows[candidates.scores == -np.inf] = -1
        return candidates, largest_norm


def require_same_vocabulary(queries: SparseRows, words: int) -> None:
    """Raise ValueError if the queries' vocabulary has another size than the passages' vocabulary of `words`."""
    if queries.dimension != words:
        raise ValueError(
            f"the vocabulary of the queries has {queries.dimension} words, that of the passages has {words}: "
            "were both encoded with the same checkpoint?"
        )


def sparse_norms(rows: SparseRows) -> np.ndarray:
    """Return upper bounds of the L2 norms of rows, float64.

    The bound is NaN if a weight is negative, NaN, infinite, or too large for a product in float32.
    """
    matrix = as_csr(rows)
    matrix.data = np.where((matrix.data >= 0) & (matrix.data < np.inf), matrix.data, np.nan) ** 2
    norms = np.sqrt(matrix.sum(axis=1)) * (1 + 1e-9)
    return np.where(norms < LONGEST_NORM, norms, np.nan)


def fill_with_zeros(candidates: Candidates, width: int) -> None:
    """Add the lowest rows with score 0 to the sorted candidates of queries with fewer than `width`, in place."""
    above = (candidates.scores > 0).sum(axis=1)
    for query in np.flatnonzero(above < width):
        count = int(above[query])
        # At most `count` of the first `width` rows score above 0, so the others are enough.
        zero_rows = np.setdiff1d(np.arange(width), candidates.rows[query, :count], assume_unique=True)
        candidates.rows[query, count:], candidates.scores[query, count:] = -1, -np.inf
        candidates.rows[query, count:width], candidates.scores[query, count:width] = zero_rows[: width - count], 0.0
