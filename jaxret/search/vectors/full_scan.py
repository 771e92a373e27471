"""Exact search without candidates: all passages are scored in float64, in the order of their rows.

It is for queries for which very many passages have a score near the k-th score: more candidates would prove nothing. In
the order of rows, a passage that ties with the current k-th passage can be skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.search.rounding import WIDE_UNIT, exact_score
from jaxret.search.vectors.query_vectors import ScoredQueries
from jaxret.search.vectors.vector_corpus import ShardedRows
from jaxret.types import SparseRows

SCAN_VALUES = 2**22  # float64 values of the passage vectors that are multiplied at a time: 32 MiB
SCAN_QUERIES, SCAN_ROWS = 512, 16_384  # most queries and rows that are multiplied at a time: 64 MiB of scores


def scan_all(
    queries: ScoredQueries, corpus: ShardedRows, scores: np.ndarray, rows: np.ndarray, largest_norm: float
) -> int:
    """Replace k passages of each query by the k best of the corpus, in place; return the number of scored pairs.

    Args:
        queries: the queries.
        corpus: the passages.
        scores: exact scores of k passages of each query in the order of the tie rule, float32 [Q,k].
        rows: rows of these passages [Q,k].
        largest_norm: upper bound of the norms of all vectors of the corpus.
    """
    errors = queries.errors(largest_norm, WIDE_UNIT)
    starts = range(0, len(queries), SCAN_QUERIES)
    parts = [np.arange(start, min(start + SCAN_QUERIES, len(queries))) for start in starts]
    query_parts = [(part, queries.take(part)) for part in parts]
    for first_row, shard in corpus:
        for start, stop in _row_ranges(shard, queries[0].shape[1]):
            block = np.arange(first_row + start, first_row + stop)
            for part, part_queries in query_parts:
                sums = part_queries.every_score(shard, start, stop)
                at_most = (sums + errors[part, None]).astype(np.float32)
                last_score, last_row = scores[part, -1:], rows[part, -1:]
                better = (at_most > last_score) | ((at_most == last_score) & (block < last_row))
                for i in np.flatnonzero(better.any(axis=1)):
                    query, columns = part[i], np.flatnonzero(better[i])
                    columns = columns[~np.isin(block[columns], rows[query])]
                    exact = _exact_scores(queries[query], shard, start + columns, sums[i, columns], errors[query])
                    merged_scores = np.append(scores[query], exact)
                    merged_rows = np.append(rows[query], block[columns])
                    order = np.lexsort((merged_rows, -merged_scores))[: scores.shape[1]]
                    scores[query], rows[query] = merged_scores[order], merged_rows[order]
    return len(queries) * corpus.total_rows


def _row_ranges(shard: Any, dimension: int) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of rows of a shard that are multiplied at a time."""
    vectors = shard.shape[1] if hasattr(shard, "shape") else -(-int(shard.lengths.sum()) // len(shard))
    step = min(SCAN_ROWS, max(1, SCAN_VALUES // (vectors * dimension)))
    step = SCAN_ROWS if isinstance(shard, SparseRows) else step
    return [(start, min(start + step, len(shard))) for start in range(0, len(shard), step)]


def _exact_scores(query: np.ndarray, shard: Any, rows: np.ndarray, sums: np.ndarray, error: float) -> np.ndarray:
    """Return the exact scores of a query [U,D] with rows of a shard from float64 sums with an error of at most `error`.

    If this leaves two float32 numbers possible, the score is computed exactly, once for equal passages.
    """
    exact = (sums + error).astype(np.float32)
    score_of: dict[bytes, np.float32] = {}
    for i in np.flatnonzero(exact != (sums - error).astype(np.float32)):
        passage = np.asarray(shard[rows[i]])
        key = passage.tobytes()
        if key not in score_of:
            score_of[key] = exact_score(query, passage.astype(np.float64))
        exact[i] = score_of[key]
    return exact + np.float32(0)  # -0 becomes 0
