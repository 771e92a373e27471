"""Exact search: the k best passages of every query, with the same ids and scores on every backend and every shard size.

The score of a passage is the float32 nearest to sum_u max_v q_u . d_v over the query's vectors u (nearly always one)
and the passage's vectors v, each product rounded to float64 once; ties go to the lower row. A backend proposes k and
some more candidates in its own float32; they are scored again in float64. A query is done when no passage that was left
out can reach its k-th score, rounding errors included; else the search is repeated with more candidates (`proof.py`).

`QueryVectors` (`query_vectors.py`) hides the difference between one query vector on V vectors a passage
(`single_vector.py`) and lists of vectors (`multi_vector.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from jaxret.parallel.progress import Progress
from jaxret.search.backends.precision import FLOAT32
from jaxret.search.backends.select import Backend
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.full_scan import scan_all
from jaxret.search.in_memory import InMemoryCorpus, LoadedBlock, require_finite_vectors
from jaxret.search.multi_vector import VectorLists
from jaxret.search.proof import (
    MARGIN,
    Candidates,
    SearchResult,
    empty_candidates,
    first_depth,
    search_until_proven,
)
from jaxret.search.query_vectors import QueryVectors, ScoredQueries
from jaxret.search.rounding import WIDE_UNIT, exact_score
from jaxret.search.single_vector import SingleVectors, block_passages
from jaxret.search.streaming import exceeds_devices, stream_blocks
from jaxret.search.vector_corpus import BlockCorpus, ShardedRows, VectorCorpus
from jaxret.types import Ragged, SparseRows, TextVectors

# Candidates beyond k of lists of vectors in fewer bits, where the losses of all query vectors add up: a little above
# what ColBERT's vectors of real texts needed in int8 (for k = 10, a median of 27 and 43, at most 85). Few are scored.
LISTS_MARGIN = 4 * MARGIN


def search(
    queries: np.ndarray | TextVectors,
    corpus: VectorCorpus | Sequence[np.ndarray | Ragged],
    k: int,
    backend: Backend,
    progress: bool = False,
) -> SearchResult:
    """Find the k best passages of float32 queries: [Q,D], or a list of vectors for each (Ragged).

    Reads shard by shard; memory grows with Q x k and one shard.

    Args:
        queries: vectors.
        corpus: an EncodedCorpus, or a list of blocks, [rows,V,D] or Ragged.
        k: passages to return for each query.
        backend: computes candidates.
        progress: show a bar.

    Raises:
        ValueError: a NaN, an infinity, or vectors of another dimension; it names the row.
        RuntimeError: the backend loses passages.
    """
    vector_corpus = BlockCorpus(corpus) if isinstance(corpus, Sequence) else corpus
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    vectors = query_vectors(queries, vector_corpus)
    if vector_corpus.ragged and not backend.lists:
        raise ValueError(f"search backend {backend.name!r} has no lists of vectors; this corpus needs xla, or auto")

    norm = 0.0  # of any vector of the corpus

    def find(part: np.ndarray, depth: int) -> tuple[Candidates, np.ndarray, int]:
        nonlocal norm
        part_vectors = vectors.take(part)
        candidates, norm = find_candidates(part_vectors, vector_corpus, depth, backend, progress)
        error = part_vectors.errors(norm, backend.precision.unit(vector_corpus.dimension))
        count = score_exactly(candidates, part_vectors, norm, vector_corpus, k, error)
        return candidates, error, count

    def settle(part: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> int:
        return scan_all(vectors.take(part), vector_corpus, scores, rows, norm)

    least = LISTS_MARGIN if vector_corpus.ragged and backend.precision != FLOAT32 else MARGIN
    depth = first_depth(k, backend.precision.more, least)
    return search_until_proven(find, len(vectors), vector_corpus.total_rows, k, backend.description, depth, settle)


def query_vectors(queries: np.ndarray | TextVectors, corpus: VectorCorpus) -> QueryVectors:
    """Return queries in the form that passages of the corpus are scored with. Raises ValueError for a NaN, an infinity,
    or vectors of another dimension."""
    queries = queries.flat if isinstance(queries, SparseRows) else queries
    flat = queries.flat if isinstance(queries, Ragged) else queries
    if flat.dtype != np.float32 or flat.ndim != 2 or flat.shape[1] != corpus.dimension:
        raise ValueError(
            f"queries are {flat.dtype} {list(flat.shape)}; the passages need float32 [Q,{corpus.dimension}]: "
            "were both encoded with the same checkpoint?"
        )
    result: QueryVectors
    if corpus.ragged:
        result = VectorLists(queries if isinstance(queries, Ragged) else Ragged.from_stacked(queries[:, None]))
    else:
        single = queries.stacked()[:, 0] if isinstance(queries, Ragged) else queries
        result = SingleVectors(np.ascontiguousarray(single))
    if not np.isfinite(result.norms).all():
        query = result.owner(int(np.argmin(np.isfinite(result.norms))))
        raise ValueError(f"query {query} has a NaN, an infinity or a number too large")
    return result


def find_candidates(
    queries: QueryVectors, corpus: VectorCorpus, depth: int, backend: Backend, progress: bool
) -> tuple[Candidates, float]:
    """Return the `depth` best passages of each query in the backend's float32, and the largest norm of any vector.

    Args:
        queries: the queries.
        corpus: the passages.
        depth: candidates for each query.
        backend: computes scores.
        progress: show a bar.
    """
    candidates = empty_candidates(len(queries), depth)
    largest_norm = 0.0
    parts = queries.parts()
    with Progress("search", corpus.total_rows, "passage", shown=progress) as bar:
        for block in _blocks(queries, corpus, depth, backend):
            largest_norm = max(largest_norm, block.largest_norm)
            for part, some in parts:
                hits = block.top(some, depth)
                candidates.add(part, hits._replace(rows=block.rows[hits.rows]), 0)
            bar.update(len(block.rows))
    return candidates, largest_norm


def _blocks(queries: QueryVectors, corpus: VectorCorpus, depth: int, backend: Backend) -> Iterator[LoadedBlock]:
    """Yield the passages in blocks, loaded by the backend; blocks that the corpus holds are not loaded again."""
    if not isinstance(corpus, InMemoryCorpus):
        yield from _loaded(queries, corpus, depth, backend)
        return
    size = 0
    if backend.max_rows is not None:
        _, shard = next(iter(corpus))
        size = block_passages(corpus.total_rows, shard.shape[1], depth, backend)
    if corpus.blocks is None or size < corpus.block_size:  # smaller blocks serve smaller depths too
        corpus.blocks = None  # before others take their memory
        blocks = _loaded(queries, corpus, depth, backend)
        if exceeds_devices(corpus, backend):
            yield from blocks
            return
        corpus.blocks, corpus.block_size = list(blocks), size
    yield from corpus.blocks


def _loaded(queries: QueryVectors, corpus: VectorCorpus, depth: int, backend: Backend) -> Iterator[LoadedBlock]:
    if isinstance(backend, Xla) and not corpus.ragged:
        yield from stream_blocks(corpus, backend)
        return
    for first_row, shard in corpus:
        for rows, block, norms in queries.blocks(shard, corpus.total_rows, depth, backend):
            require_finite_vectors(corpus, first_row + rows, norms)
            yield LoadedBlock(first_row + rows, backend.load(block), float(norms.max()))


def score_exactly(
    candidates: Candidates, queries: ScoredQueries, largest_norm: float, corpus: ShardedRows, k: int, error: np.ndarray
) -> int:
    """Replace the backend's scores by exact scores, and sort the candidates by the tie rule, in place; return how many
    were scored.

    The k candidates with the highest backend scores are scored first, then those whose upper bound reaches the lowest
    of these; the others get -inf.

    Args:
        candidates: with the backend's scores.
        queries: the queries.
        largest_norm: of any passage.
        corpus: the passages.
        k: passages to return for each query.
        error: that the backend's scores may be below the exact ones [Q].
    """
    n_queries, depth = candidates.scores.shape
    scores = np.full((n_queries, depth), -np.inf, np.float32)
    first = np.ones(scores.shape, bool)
    if k < depth:
        first[:] = False
        np.put_along_axis(first, np.argpartition(-candidates.scores, k - 1, axis=1)[:, :k], True, axis=1)
    errors = queries.errors(largest_norm, WIDE_UNIT)
    count = score_pairs(scores, first, candidates.rows, queries, errors, corpus)
    lowest = np.where(first, scores, np.inf).min(axis=1, keepdims=True)
    at_most = (candidates.scores.astype(np.float64) + error[:, None]).astype(np.float32)  # rounding is monotone
    count += score_pairs(scores, ~first & (at_most >= lowest), candidates.rows, queries, errors, corpus)
    candidates.scores[:], candidates.rows[:] = sorted_by_rule(scores, candidates.rows)
    return count


def score_candidates(
    queries: ScoredQueries, rows: np.ndarray, corpus: ShardedRows, k: int, largest_norm: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best candidates by exact scores and the tie rule: scores [Q,k], rows [Q,k].

    Args:
        queries: the queries; each has at least k candidates.
        rows: candidates [Q,C], -1 for none.
        corpus: the passages.
        k: candidates to return.
        largest_norm: upper bound of the norm of any vector of the corpus.
    """
    scores = np.full(rows.shape, -np.inf, np.float32)
    every = np.ones(rows.shape, bool)
    score_pairs(scores, every, rows, queries, queries.errors(largest_norm, WIDE_UNIT), corpus)
    best = sorted_by_rule(scores, rows)
    return best[0][:, :k], best[1][:, :k]


def sorted_by_rule(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and rows [Q,n], score descending, then row ascending; entries without score (-inf) come last, in no
    order."""
    order = np.argsort(-scores, axis=1)  # ten times faster than a sort by two keys, which few queries need
    sorted_scores = np.take_along_axis(scores, order, axis=1)
    ties = ((sorted_scores[:, 1:] == sorted_scores[:, :-1]) & (sorted_scores[:, 1:] > -np.inf)).any(axis=1)
    order[ties] = np.lexsort((rows[ties], -scores[ties]), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def score_pairs(
    scores: np.ndarray,
    which: np.ndarray,
    rows: np.ndarray,
    queries: ScoredQueries,
    errors: np.ndarray,
    corpus: ShardedRows,
) -> int:
    """Write the exact scores of some (query, row) pairs of [Q,depth]; return how many.

    A float64 sum may be off by a little. Where that leaves two float32 numbers possible, the products (exact in
    float64) are summed by math.fsum, so that the result is a function of the vectors alone.

    Args:
        scores: float32 [Q,depth], written in place.
        which: bool [Q,depth], the pairs to score.
        rows: rows of the corpus [Q,depth]; -1 for none.
        queries: the queries.
        errors: upper bound of the error of a float64 score, for each query.
        corpus: the passages.
    """
    query_of, column_of = np.nonzero(which & (rows >= 0))
    if not len(query_of):
        return 0  # nothing to read the corpus for
    row_of = rows[query_of, column_of]

    def score(first_row: int, shard: Any, pairs: np.ndarray) -> None:
        query, shard_rows = query_of[pairs], row_of[pairs] - first_row
        sums, error = queries.scores(query, shard, shard_rows), errors[query]
        exact = (sums + error).astype(np.float32)
        for i in np.flatnonzero(exact != (sums - error).astype(np.float32)):
            exact[i] = exact_score(queries[query[i]], shard[shard_rows[i]].astype(np.float64))
        scores[query, column_of[pairs]] = exact + np.float32(0)  # -0 becomes 0

    by_row, cores = None, os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:  # numpy gives the interpreter lock back
        for first_row, shard in corpus:
            if len(shard) == corpus.total_rows:
                pairs = np.arange(len(row_of))
            else:  # each shard is read once, and the pairs of a query stay together
                by_row = np.argsort(row_of) if by_row is None else by_row
                begin, end = np.searchsorted(row_of, [first_row, first_row + len(shard)], sorter=by_row)
                pairs = np.sort(by_row[begin:end])
            step = max(queries.pairs_a_thread, -(-len(pairs) // (2 * cores)))
            parts = [pairs[start : start + step] for start in range(0, len(pairs), step)]
            at_once = threads.map if len(parts) > 1 else map  # no thread is started for a single one
            for _ in at_once(partial(score, first_row, shard), parts):
                pass  # an error is raised here
    return len(query_of)
