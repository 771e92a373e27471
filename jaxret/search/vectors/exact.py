"""Exact search: the k best passages of every query, with the same ids and scores on every backend and every shard size.

The score of a passage is the float32 nearest to sum_u max_v q_u . d_v over the query's vectors u (nearly always one)
and the passage's vectors v, each product rounded to float64 once. Of equal scores, the lower row comes first. A backend
proposes more than k candidates by its own float32 scores; they are scored again in float64. The search ends when no
passage that was left out can reach the k-th score, rounding errors included. Else it is repeated with more candidates
(`proof.py`).

`QueryVectors` (`query_vectors.py`) hides whether queries are single vectors (`single_vector.py`) or lists of vectors
(`multi_vector.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from jaxret.parallel.progress import COMPILATION, Progress
from jaxret.search.backends.precision import FLOAT32
from jaxret.search.backends.select import Backend
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.proof import MARGIN, Candidates, SearchResult, empty_candidates, first_depth, search_until_proven
from jaxret.search.rounding import WIDE_UNIT, exact_score
from jaxret.search.vectors.faster_backend import faster_backend
from jaxret.search.vectors.full_scan import scan_all
from jaxret.search.vectors.in_memory import InMemoryCorpus, LoadedBlock, require_finite_vectors
from jaxret.search.vectors.multi_vector import VectorLists
from jaxret.search.vectors.query_vectors import QueryVectors, ScoredQueries
from jaxret.search.vectors.single_vector import SingleVectors, block_passages
from jaxret.search.vectors.streaming import exceeds_devices, stream_blocks
from jaxret.search.vectors.vector_corpus import BlockCorpus, ShardedRows, VectorCorpus
from jaxret.types import Ragged, SparseRows, TextVectors

# Candidates beyond k for lists of vectors below float32, where the losses of all query vectors add up. For k = 10,
# ColBERT on real texts needed medians of 27 and 43, and at most 85, in int8. Only a few of them are scored exactly.
LISTS_MARGIN = 4 * MARGIN


def search(
    queries: np.ndarray | TextVectors,
    corpus: VectorCorpus | Sequence[np.ndarray | Ragged],
    k: int,
    backend: Backend,
    progress: bool = False,
) -> SearchResult:
    """Return the k best passages of each query.

    The corpus is read shard by shard; memory holds Q x k results and one shard.

    Args:
        queries: query vectors float32 [Q,D], or a list of vectors for each query (Ragged).
        corpus: an EncodedCorpus, or a list of blocks, [rows,V,D] or Ragged.
        k: passages to return for each query.
        backend: the backend that finds candidates.
        progress: whether to show a bar.

    Raises:
        ValueError: a NaN, an infinity, or vectors of another dimension; the message has the row.
        RuntimeError: the backend omits passages.
    """
    vector_corpus = BlockCorpus(corpus) if isinstance(corpus, Sequence) else corpus
    vectors = query_vectors(queries, vector_corpus)
    if vector_corpus.ragged and not backend.multi_vector:
        raise ValueError(f"search backend {backend.name!r} cannot search lists of vectors; use xla, or auto")

    margin = LISTS_MARGIN if vector_corpus.ragged and backend.precision != FLOAT32 else MARGIN
    depth = first_depth(k, backend.precision.extra_candidates, margin)
    backend = faster_backend(
        backend,
        vectors,
        vector_corpus,
        lambda part, sample, choice: find_candidates(part, sample, depth, choice, False),
    )
    norm = 0.0  # largest norm of a vector of the corpus

    def find(part: np.ndarray, depth: int) -> tuple[Candidates, np.ndarray, int]:
        nonlocal norm
        part_vectors = vectors.take(part)
        candidates, norm = find_candidates(part_vectors, vector_corpus, depth, backend, progress)
        error = part_vectors.errors(norm, backend.precision.unit(vector_corpus.dimension))
        count = score_exactly(candidates, part_vectors, norm, vector_corpus, k, error)
        return candidates, error, count

    def settle(part: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> int:
        return scan_all(vectors.take(part), vector_corpus, scores, rows, norm)

    return search_until_proven(find, len(vectors), vector_corpus.total_rows, k, backend.description, depth, settle)


def query_vectors(queries: np.ndarray | TextVectors, corpus: VectorCorpus) -> QueryVectors:
    """Return queries in the form in which they score passages of the corpus.

    Raises ValueError for a NaN, an infinity, or vectors of another dimension.
    """
    queries = queries.flat if isinstance(queries, SparseRows) else queries
    flat = queries.flat if isinstance(queries, Ragged) else queries
    if flat.dtype != np.float32 or flat.ndim != 2 or flat.shape[1] != corpus.dimension:
        raise ValueError(
            f"queries are {flat.dtype} {list(flat.shape)}; they must be float32 [Q,{corpus.dimension}]: "
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
    """Return the `depth` best passages of each query by the backend's scores, and the largest norm of a vector.

    Args:
        queries: the queries.
        corpus: the passages.
        depth: candidates for each query.
        backend: the backend that computes the scores.
        progress: whether to show a bar.
    """
    candidates = empty_candidates(len(queries), depth)
    largest_norm = 0.0
    parts = queries.parts()
    cause = COMPILATION if backend.name == "xla" else ""
    with Progress("search", corpus.total_rows, "passage", progress=progress, cause=cause) as bar:
        for block in _keep_blocks(queries, corpus, depth, backend):
            largest_norm = max(largest_norm, block.largest_norm)
            for part, part_vectors in parts:
                hits = block.top(part_vectors, depth)
                candidates.add(part, hits._replace(rows=block.rows[hits.rows]), 0)
            bar.update(len(block.rows))
    return candidates, largest_norm


def _keep_blocks(queries: QueryVectors, corpus: VectorCorpus, depth: int, backend: Backend) -> Iterator[LoadedBlock]:
    """Yield the passages in blocks that the backend has loaded; an InMemoryCorpus keeps them for the next search."""
    if not isinstance(corpus, InMemoryCorpus):
        yield from _load_blocks(queries, corpus, depth, backend)
        return
    size = 0
    if backend.max_rows is not None:
        _, shard = next(iter(corpus))
        size = block_passages(corpus.total_rows, shard.shape[1], depth, backend)
    if corpus.blocks is None or size < corpus.block_size:  # small blocks also work for smaller depths
        corpus.blocks = None  # frees their memory before the new blocks are loaded
        blocks = _load_blocks(queries, corpus, depth, backend)
        if exceeds_devices(corpus, backend):
            yield from blocks
            return
        corpus.blocks, corpus.block_size = list(blocks), size
    yield from corpus.blocks


def _load_blocks(queries: QueryVectors, corpus: VectorCorpus, depth: int, backend: Backend) -> Iterator[LoadedBlock]:
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
    """Replace the backend's scores by exact scores, and sort the candidates by the tie rule, in place.

    The k candidates with the highest scores of the backend are scored first. Then the candidates are scored whose
    upper bound reaches the lowest of these k scores. The others get -inf.

    Args:
        candidates: the candidates with the backend's scores.
        queries: the queries.
        largest_norm: largest norm of a passage vector.
        corpus: the passages.
        k: passages to return for each query.
        error: largest amount by which the backend's scores may be below the exact scores [Q].

    Returns:
        The number of pairs that were scored.
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
    # Rounding to float32 keeps the order of scores.
    upper = (candidates.scores.astype(np.float64) + error[:, None]).astype(np.float32)
    count += score_pairs(scores, ~first & (upper >= lowest), candidates.rows, queries, errors, corpus)
    candidates.scores[:], candidates.rows[:] = sorted_by_rule(scores, candidates.rows)
    return count


def score_candidates(
    queries: ScoredQueries, rows: np.ndarray, corpus: ShardedRows, k: int, largest_norm: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores [Q,k] and rows [Q,k] of the k best candidates by exact scores and the tie rule.

    Args:
        queries: the queries; each has at least k candidates.
        rows: rows of the candidates [Q,C], -1 for padding.
        corpus: the passages.
        k: candidates to return.
        largest_norm: upper bound of the norms of all vectors of the corpus.
    """
    scores = np.full(rows.shape, -np.inf, np.float32)
    mask = np.ones(rows.shape, bool)
    score_pairs(scores, mask, rows, queries, queries.errors(largest_norm, WIDE_UNIT), corpus)
    best = sorted_by_rule(scores, rows)
    return best[0][:, :k], best[1][:, :k]


def sorted_by_rule(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and rows [Q,n], sorted by descending score, then by ascending row.

    Entries of score -inf come last, in any order.
    """
    order = np.argsort(-scores, axis=1)  # ten times as fast as a sort by two keys, which only queries with ties need
    sorted_scores = np.take_along_axis(scores, order, axis=1)
    ties = ((sorted_scores[:, 1:] == sorted_scores[:, :-1]) & (sorted_scores[:, 1:] > -np.inf)).any(axis=1)
    order[ties] = np.lexsort((rows[ties], -scores[ties]), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def score_pairs(
    scores: np.ndarray,
    mask: np.ndarray,
    rows: np.ndarray,
    queries: ScoredQueries,
    errors: np.ndarray,
    corpus: ShardedRows,
) -> int:
    """Write the exact scores of some pairs (query, row) into `scores`; return the number of pairs.

    A float64 sum has a small error. If it leaves two float32 numbers possible, the products (exact in float64) are
    summed by math.fsum, so that the result depends only on the vectors.

    Args:
        scores: float32 [Q,depth], changed in place.
        mask: bool [Q,depth], the pairs to score.
        rows: rows of the corpus [Q,depth]; -1 for padding.
        queries: the queries.
        errors: upper bound of the error of a float64 score, for each query [Q].
        corpus: the passages.
    """
    query_of, column_of = np.nonzero(mask & (rows >= 0))
    if not len(query_of):
        return 0  # the corpus need not be read
    row_of = rows[query_of, column_of]

    def score(first_row: int, shard: Any, pairs: np.ndarray) -> None:
        query, shard_rows = query_of[pairs], row_of[pairs] - first_row
        sums, error = queries.scores(query, shard, shard_rows), errors[query]
        exact = (sums + error).astype(np.float32)
        for i in np.flatnonzero(exact != (sums - error).astype(np.float32)):
            exact[i] = exact_score(queries[query[i]], shard[shard_rows[i]].astype(np.float64))
        scores[query, column_of[pairs]] = exact + np.float32(0)  # -0 becomes 0

    by_row, cores = None, os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:  # numpy releases the interpreter lock
        for first_row, shard in corpus:
            if len(shard) == corpus.total_rows:
                pairs = np.arange(len(row_of))
            else:  # each shard is read once, and the pairs of a query stay together
                by_row = np.argsort(row_of) if by_row is None else by_row
                begin, end = np.searchsorted(row_of, [first_row, first_row + len(shard)], sorter=by_row)
                pairs = np.sort(by_row[begin:end])
            step = max(queries.pairs_a_thread, -(-len(pairs) // (2 * cores)))
            parts = [pairs[start : start + step] for start in range(0, len(pairs), step)]
            map_parts = threads.map if len(parts) > 1 else map  # a single part needs no thread
            for _ in map_parts(partial(score, first_row, shard), parts):
                pass  # raises the errors of the threads
    return len(query_of)
