"""Exact search without candidates: all passages are scored in float64, in the order of their rows.

For queries that candidates do not prove, because very many passages have the k-th score, or nearly: more candidates
would be as many more near ties. In the order of rows, a passage that only ties with the k-th one found before it is
left out without a further look.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxret.search.query_vectors import ScoredQueries
from jaxret.search.rounding import WIDE_UNIT, exact_score
from jaxret.search.vector_corpus import ShardedRows
from jaxret.types import SparseRows

NUMBERS = 2**22  # of passages that are multiplied at a time, as float64: 32 MiB
QUERIES, ROWS = 512, 16_384  # multiplied at a time, at most: their scores are 64 MiB


def scan_all(
    queries: ScoredQueries, corpus: ShardedRows, scores: np.ndarray, rows: np.ndarray, largest_norm: float
) -> int:
    """Replace good passages of each query by the best of the corpus, in place; return how many pairs were scored.

    Args:
        scores: exact scores of k passages of each query in the order of the tie rule, float32 [Q,k].
        rows: their rows [Q,k].
        largest_norm: upper bound of the norm of any vector of the corpus.
    """
    errors = queries.errors(largest_norm, WIDE_UNIT)
    parts = [np.arange(start, min(start + QUERIES, len(queries))) for start in range(0, len(queries), QUERIES)]
    several = [(part, queries.take(part)) for part in parts]
    for first_row, shard in corpus:
        for start, stop in _steps(shard, queries[0].shape[1]):
            block = np.arange(first_row + start, first_row + stop)
            for part, some in several:
                sums = some.every_score(shard, start, stop)
                at_most = (sums + errors[part, None]).astype(np.float32)
                last_score, last_row = scores[part, -1:], rows[part, -1:]
                better = (at_most > last_score) | ((at_most == last_score) & (block < last_row))
                for i in np.flatnonzero(better.any(axis=1)):
                    query, columns = part[i], np.flatnonzero(better[i])
                    columns = columns[~np.isin(block[columns], rows[query])]
                    exact = _exact_scores(queries[query], shard, start + columns, sums[i, columns], errors[query])
                    every_score = np.append(scores[query], exact)
                    every_row = np.append(rows[query], block[columns])
                    order = np.lexsort((every_row, -every_score))[: scores.shape[1]]
                    scores[query], rows[query] = every_score[order], every_row[order]
    return len(queries) * corpus.total_rows


def _steps(shard: Any, dimension: int) -> list[tuple[int, int]]:
    """Return the bounds of so many rows of a shard as are multiplied at a time."""
    vectors = shard.shape[1] if hasattr(shard, "shape") else -(-int(shard.lengths.sum()) // len(shard))
    step = ROWS if isinstance(shard, SparseRows) else min(ROWS, max(1, NUMBERS // (vectors * dimension)))
    return [(start, min(start + step, len(shard))) for start in range(0, len(shard), step)]


def _exact_scores(query: np.ndarray, shard: Any, rows: np.ndarray, sums: np.ndarray, error: float) -> np.ndarray:
    """Return the exact scores of a query [U,D] with rows of a shard, from float64 sums that may be off by `error`.
    Where two float32 numbers are possible, equal passages are summed once."""
    exact = (sums + error).astype(np.float32)
    score_of: dict[bytes, np.float32] = {}
    for i in np.flatnonzero(exact != (sums - error).astype(np.float32)):
        passage = np.asarray(shard[rows[i]])
        key = passage.tobytes()
        if key not in score_of:
            score_of[key] = exact_score(query, passage.astype(np.float64))
        exact[i] = score_of[key]
    return exact + np.float32(0)  # -0 becomes 0
