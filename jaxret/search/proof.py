"""The proof that an exact search missed nothing.

A search returns candidates and an upper bound of the score of every passage that it left out. While this bound is not
below a query's k-th score, the search is repeated with more candidates. The caller scores candidates exactly
(`exact.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MARGIN = 32  # least number of candidates beyond k; nearly every query is then proven in one round
GROUP = 16  # group size in a long row of scores, whose highest scores are found through the maxima of groups
# If 1 / FULL_SCAN_SHARE of the corpus were candidates and proved nothing, a scan of the whole corpus costs less.
FULL_SCAN_SHARE = 8
PASS_CANDIDATES = 2**24  # candidates in memory at a time, about 0.5 GB; for more queries, the corpus is read again


@dataclass(frozen=True)
class SearchResult:
    """The k best passages of each query, or all of a smaller corpus; score descending, then row ascending."""

    scores: np.ndarray  # [Q,k] float32
    rows: np.ndarray  # [Q,k] int64, rows of the corpus
    backend: str  # description of the backend
    rounds: tuple[int, ...]  # number of queries searched in each round; those after the first had too many near ties
    scored_pairs: int = 0  # (query, passage) pairs that were scored exactly


def no_result(queries: int, backend: str) -> SearchResult:
    """Return the result of a search in an empty corpus."""
    return SearchResult(np.empty((queries, 0), np.float32), np.empty((queries, 0), np.int64), backend, (queries,))


def recall_at(scores: np.ndarray, exact_scores: np.ndarray, k: int) -> float:
    """Return the share of the k best passages that an approximate search found.

    Both arrays of scores [Q,>=k] are descending. Scores are compared, so passages with equal scores count alike.
    """
    return float((scores[:, :k] >= exact_scores[:, k - 1 : k]).mean())


class BlockHits(NamedTuple):
    """The best passages of a block for each query, all different."""

    scores: np.ndarray  # [Q,k] float32, descending
    rows: np.ndarray  # [Q,k] int64, rows of the block
    bound: np.ndarray  # [Q] float32, upper bound of the scores of all other passages; -inf if there are none


BlockSearch = Callable[[Any, int], BlockHits]  # arguments: queries [Q,D] (Ragged if the block has lists), and k


def keep_best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of the k highest scores [Q,n], in any order, and the highest score of all other columns."""
    n = scores.shape[1]
    if k >= n:
        return np.broadcast_to(np.arange(n), scores.shape), np.full(len(scores), -np.inf, np.float32)
    if n > 4 * GROUP * k:  # the k best scores are in the k groups with the highest maxima, or in columns without group
        groups = n // GROUP
        grid = scores[:, : groups * GROUP].reshape(-1, GROUP, groups)  # column c is in group c % groups
        best_groups, other_groups_maximum = keep_best(grid.max(axis=1), k)
        inside = (best_groups[:, None] + groups * np.arange(GROUP)[:, None]).reshape(len(scores), -1)
        outside = np.broadcast_to(np.arange(groups * GROUP, n), (len(scores), n - groups * GROUP))
        columns = np.concatenate([inside, outside], axis=1)
        order, left_out = keep_best(np.take_along_axis(scores, columns, axis=1), k)
        return np.take_along_axis(columns, order, axis=1), np.maximum(other_groups_maximum, left_out)
    order = np.argpartition(scores, (n - k - 1, n - k), axis=1)  # column n - k - 1 has the highest score left out
    return order[:, n - k :], np.take_along_axis(scores, order[:, n - k - 1 : n - k], axis=1)[:, 0]


def best_columns(scores: np.ndarray, count: int) -> BlockHits:
    """Return the `count` highest scores of each row [Q,n], descending, their columns, and the next score [Q]."""
    columns, left_out = keep_best(scores, count)
    top = np.take_along_axis(scores, columns, axis=1)
    order = np.argsort(-top, axis=1)
    return BlockHits(np.take_along_axis(top, order, axis=1), np.take_along_axis(columns, order, axis=1), left_out)


class Candidates(NamedTuple):
    """The best passages of each query in the blocks that were searched so far, by the backend's float32 scores."""

    scores: np.ndarray  # [Q,depth] float32; -inf in empty slots
    rows: np.ndarray  # [Q,depth] int64; -1 in empty slots
    bound: np.ndarray  # [Q] float32, upper bound of the scores of all other passages

    def add(self, part: slice, hits: BlockHits, first_row: int) -> None:
        """Merge the hits of some queries (`part`) in the block that begins at a row of the corpus, in place."""
        floor = self.scores[part].min(axis=1, keepdims=True)
        width = int((hits.scores > floor).sum(axis=1).max())  # scores descend, so later columns are not needed
        bounds = [self.bound[part], hits.bound]
        if width < hits.scores.shape[1]:
            bounds.append(hits.scores[:, width])
        if width:
            scores = np.concatenate([self.scores[part], hits.scores[:, :width]], axis=1)
            rows = np.concatenate([self.rows[part], hits.rows[:, :width] + first_row], axis=1)
            columns, left_out = keep_best(scores, self.scores.shape[1])
            self.scores[part] = np.take_along_axis(scores, columns, axis=1)
            self.rows[part] = np.take_along_axis(rows, columns, axis=1)
            bounds.append(left_out)
        self.bound[part] = np.max(bounds, axis=0)


def empty_candidates(queries: int, depth: int) -> Candidates:
    """Return candidates with empty slots only: scores and bounds are minus infinity."""
    return Candidates(
        np.full((queries, depth), -np.inf, np.float32),
        np.full((queries, depth), -1, np.int64),
        np.full(queries, -np.inf, np.float32),
    )


def first_depth(k: int, extra_share: float, margin: int) -> int:
    """Return the number of candidates of a query in the first round: k plus a share of k, but at least k + `margin`.

    Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    return k + max(margin, int(k * extra_share))


def search_until_proven(
    find: Callable[[np.ndarray, int], tuple[Candidates, np.ndarray, int]],
    queries: int,
    total_rows: int,
    k: int,
    description: str,
    depth: int,
    settle: Callable[[np.ndarray, np.ndarray, np.ndarray], int] | None = None,
) -> SearchResult:
    """Search for candidates of every query, and search again with twice as many until the results are proven.

    A query is proven when its bound plus error is below its k-th exact score: then no passage that was left out can be
    among the k best. If all candidates after the k-th tie with it, or if there are already many candidates, more of
    them would prove little. Then `settle` scores all passages instead.

    Args:
        find: function of (queries, depth). It returns the best `depth` candidates with exact scores in the order of
            the tie rule, where `bound` bounds the backend's scores of all other passages; the largest error of the
            backend's scores for each query (only errors below the exact score, if scores are upper bounds); and the
            number of pairs that were scored exactly.
        queries: number of queries.
        total_rows: passages of the corpus.
        k: passages to return for each query.
        description: description of the backend, for the result.
        depth: candidates of each query in the first round.
        settle: function of (queries, their best scores, their rows). It replaces both by the best of all passages, in
            place, and returns the number of pairs that were scored. None: all passages are never scored.

    Raises RuntimeError if the backend omits passages although all are requested.
    """
    width = min(k, total_rows)
    scores = np.empty((queries, width), np.float32)
    rows = np.empty((queries, width), np.int64)
    needs_full_scan = np.zeros(queries, bool)
    unproven_queries, rounds, scored_pairs = np.arange(queries), [], 0
    while unproven_queries.size:
        rounds.append(len(unproven_queries))
        if settle and (full_scan_queries := unproven_queries[needs_full_scan[unproven_queries]]).size:
            best = scores[full_scan_queries], rows[full_scan_queries]
            scored_pairs += settle(full_scan_queries, *best)
            scores[full_scan_queries], rows[full_scan_queries] = best
            unproven_queries = unproven_queries[~needs_full_scan[unproven_queries]]
        depth = min(depth, total_rows)
        unproven = [unproven_queries[:0]]
        for part in _parts(unproven_queries, max(1, PASS_CANDIDATES // depth)):
            candidates, error, count = find(part, depth)
            scored_pairs += count
            scores[part], rows[part] = candidates.scores[:, :width], candidates.rows[:, :width]
            # Rounding to float32 keeps the order of scores.
            highest_left_out = (candidates.bound.astype(np.float64) + error).astype(np.float32)
            unproven.append(part[highest_left_out >= scores[part, -1]])
            ties = (candidates.scores[:, -1] == scores[part, -1]) & (scores[part, -1] > -np.inf) & (depth > width)
            needs_full_scan[part] = ties | (FULL_SCAN_SHARE * depth >= total_rows)
        unproven_queries = np.concatenate(unproven)
        if unproven_queries.size and depth == total_rows:
            raise RuntimeError(f"{description} did not return all {depth} passages: choose another backend")
        depth *= 2
    return SearchResult(scores, rows, description, tuple(rounds), scored_pairs)


def _parts(indices: np.ndarray, size: int) -> Iterable[np.ndarray]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
