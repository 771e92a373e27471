"""The proof that an exact search missed nothing.

A search returns candidates and an upper bound on the score of every passage that it left out. While that bound does not
lie below a query's k-th score, the search is repeated with more candidates. How candidates are scored exactly is the
caller's business (`exact.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MARGIN = 32  # candidates beyond k at least: enough for nearly every query to be proven in one round
GROUP = 16  # scores of a long row, of which the best ones are looked for among groups by their maxima
WHOLE = 8  # where an eighth of the corpus were candidates and proved nothing, all of it is scored, which costs less
PASS_CANDIDATES = 2**24  # candidates held at a time, about 0.5 GB; with more queries, the corpus is read again


@dataclass(frozen=True)
class SearchResult:
    """The best k passages of each query, or all if there are fewer; score descending, then row ascending."""

    scores: np.ndarray  # [Q,k] float32
    rows: np.ndarray  # [Q,k] int64, global rows
    backend: str  # its description
    rounds: tuple[int, ...]  # queries searched in each round; the second and later ones had too many near ties
    scored_pairs: int = 0  # (query, passage) pairs that were scored exactly


def no_result(queries: int, backend: str) -> SearchResult:
    """Return the result of a search among no passages."""
    return SearchResult(np.empty((queries, 0), np.float32), np.empty((queries, 0), np.int64), backend, (queries,))


def recall_at(scores: np.ndarray, exact_scores: np.ndarray, k: int) -> float:
    """Return the share of the k best passages that an approximate search found.

    It compares scores [Q,>=k], both descending: of equal scores it does not matter which passages were found.
    """
    return float((scores[:, :k] >= exact_scores[:, k - 1 : k]).mean())


class BlockHits(NamedTuple):
    """The best passages of a block for each query; no passage twice."""

    scores: np.ndarray  # [Q,k] float32, descending
    rows: np.ndarray  # [Q,k] int64, within the block
    bound: np.ndarray  # [Q] float32: no passage left out scores higher; -inf where none was left out


BlockSearch = Callable[[Any, int], BlockHits]  # queries [Q,D], or Ragged where the block holds lists; and k


def keep_best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns [Q,min(k,n)] of the k highest scores [Q,n], unordered, and the highest score left out [Q]."""
    n = scores.shape[1]
    if k >= n:
        return np.broadcast_to(np.arange(n), scores.shape), np.full(len(scores), -np.inf, np.float32)
    if n > 4 * GROUP * k:  # the k best scores are in the k groups with the best maxima, or among what is in no group
        groups = n // GROUP
        grid = scores[:, : groups * GROUP].reshape(-1, GROUP, groups)  # column c is in group c % groups
        best_groups, others = keep_best(grid.max(axis=1), k)
        inside = (best_groups[:, None] + groups * np.arange(GROUP)[:, None]).reshape(len(scores), -1)
        rest = np.broadcast_to(np.arange(groups * GROUP, n), (len(scores), n - groups * GROUP))
        columns = np.concatenate([inside, rest], axis=1)
        order, left_out = keep_best(np.take_along_axis(scores, columns, axis=1), k)
        return np.take_along_axis(columns, order, axis=1), np.maximum(others, left_out)
    order = np.argpartition(scores, (n - k - 1, n - k), axis=1)  # the best left out ends up at column n - k - 1
    return order[:, n - k :], np.take_along_axis(scores, order[:, n - k - 1 : n - k], axis=1)[:, 0]


class Candidates(NamedTuple):
    """The best passages of each query so far, by the backend's float32 scores."""

    scores: np.ndarray  # [Q,depth] float32, -inf where still empty
    rows: np.ndarray  # [Q,depth] int64, -1 where still empty
    bound: np.ndarray  # [Q] float32: no passage that is not here scores higher

    def add(self, part: slice, hits: BlockHits, first_row: int) -> None:
        """Merge the hits of queries `part` in the block that starts at global row `first_row`."""
        floor = self.scores[part].min(axis=1, keepdims=True)
        width = int((hits.scores > floor).sum(axis=1).max())  # descending: no later column can enter
        bounds = [self.bound[part], hits.bound]
        if width < hits.scores.shape[1]:
            bounds.append(hits.scores[:, width])
        if width:
            scores = np.concatenate([self.scores[part], hits.scores[:, :width]], axis=1)
            rows = np.concatenate([self.rows[part], hits.rows[:, :width] + first_row], axis=1)
            places, left_out = keep_best(scores, self.scores.shape[1])
            self.scores[part] = np.take_along_axis(scores, places, axis=1)
            self.rows[part] = np.take_along_axis(rows, places, axis=1)
            bounds.append(left_out)
        self.bound[part] = np.max(bounds, axis=0)


def empty_candidates(queries: int, depth: int) -> Candidates:
    return Candidates(
        np.full((queries, depth), -np.inf, np.float32),
        np.full((queries, depth), -1, np.int64),
        np.full(queries, -np.inf, np.float32),
    )


def first_depth(k: int, more: float, least: int) -> int:
    """Return the number of candidates of a query in the first round: k and a share of it more, at least `least`
    more."""
    return k + max(least, int(k * more))


def search_until_proven(
    find: Callable[[np.ndarray, int], tuple[Candidates, np.ndarray, int]],
    queries: int,
    total_rows: int,
    k: int,
    description: str,
    depth: int,
    settle: Callable[[np.ndarray, np.ndarray, np.ndarray], int] | None = None,
) -> SearchResult:
    """Search for k and some more candidates of every query, and for twice as many where that proves nothing.

    A query is proven when its highest bound plus error lies below its k-th exact score: then no passage that was left
    out can belong to the best k. If all candidates after the k-th tie with it, or if there were many candidates, more
    of them would prove little: `settle` scores all passages instead.

    Args:
        find: function of (queries, depth) that returns the best `depth` candidates with exact scores, in the order of
            the tie rule, where `bound` is an upper bound on the backend's score of every other passage; the error of
            the backend's scores for each query (below the exact score, where scores are upper bounds); and the number
            of pairs that were scored exactly.
        k: passages to return for each query.
        description: of the backend, for the result.
        depth: candidates of each query in the first round.
        settle: function of (queries, their best scores, their rows) that replaces both by the best of all passages, and
            returns the number of pairs that were scored; None: only candidates are looked at.

    Raises RuntimeError if the backend does not return all passages when it is asked for all.
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
            highest_left_out = (candidates.bound.astype(np.float64) + error).astype(np.float32)  # rounding is monotone
            unproven.append(part[highest_left_out >= scores[part, -1]])
            ties = (candidates.scores[:, -1] == scores[part, -1]) & (scores[part, -1] > -np.inf) & (depth > width)
            needs_full_scan[part] = ties | (WHOLE * depth >= total_rows)
        unproven_queries = np.concatenate(unproven)
        if unproven_queries.size and depth == total_rows:
            raise RuntimeError(f"{description} did not return all {depth} passages: choose another backend")
        depth *= 2
    return SearchResult(scores, rows, description, tuple(rounds), scored_pairs)


def _parts(indices: np.ndarray, size: int) -> Iterable[np.ndarray]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
