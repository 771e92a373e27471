"""Exact search: the k best documents of every query, the same ids and scores on every backend and every shard size.

The score of a document is the float32 nearest to sum_u max_v q_u . d_v over the query's vectors u (nearly always one)
and the document's vectors v, each product rounded to float64 once; ties go to the lower row. A backend proposes k and
some more candidates in its own float32; they are scored again in float64; and a query is done when no document that was
left out can reach its k-th score, rounding errors included. Others look deeper.

What differs between one query vector on V vectors a document (`dense.py`) and lists of vectors (`late.py`) is behind
`QueryVectors`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from jaxret.retrieval.backends import Backend, Xla
from jaxret.retrieval.dense import SingleVectors, block_documents
from jaxret.retrieval.kept import Block, Kept, require_finite
from jaxret.retrieval.late import VectorLists
from jaxret.retrieval.lists import Padded
from jaxret.retrieval.pieces import in_turns, pieces
from jaxret.retrieval.precision import FLOAT32
from jaxret.retrieval.proof import MARGIN, Candidates, SearchResult, empty_candidates, search_until_proven
from jaxret.retrieval.rounding import WIDE_UNIT, exact_score
from jaxret.types import Ragged

# Candidates beyond k of lists of vectors in fewer bits, where the losses of all query vectors add up: a little above
# what ColBERT's vectors of real texts needed in int8 (for k = 10, a median of 27 and 43, at most 85). Few are scored.
LISTS_MARGIN = 4 * MARGIN


@runtime_checkable
class Corpus(Protocol):
    """Vectors in shards; a ShardSet is one."""

    @property
    def total_rows(self) -> int: ...
    @property
    def dimension(self) -> int: ...
    @property
    def ragged(self) -> bool:
        """Whether every row has its own number of vectors."""
        ...

    def describe(self, row: int) -> str:
        """What a message calls a row."""
        ...

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """(first row, vectors [rows,V,D] or Ragged) of each shard."""
        ...


@dataclass(frozen=True)
class InMemory:
    """Blocks of vectors, all [rows,V,D] (float32 or float16) or all Ragged, as a corpus."""

    blocks: Sequence[np.ndarray | Ragged]

    def __post_init__(self) -> None:
        flat = [b.flat if isinstance(b, Ragged) else b for b in self.blocks]
        shapes = sorted({(isinstance(b, Ragged), *f.shape[1:]) for b, f in zip(self.blocks, flat)})
        wrong = len(shapes) != 1 or len(shapes[0]) != 3 - shapes[0][0] or 0 in shapes[0][1:]
        if wrong or self.total_rows == 0:
            found = [list(shape[1:]) for shape in shapes]
            raise ValueError(f"blocks of vectors must be [rows,V,D] with one V and D and at least a row, got {found}")
        if kinds := {str(f.dtype) for f in flat} - {"float32", "float16"}:
            raise ValueError(f"blocks of vectors must be float32 or float16, not {', '.join(sorted(kinds))}")
        first = 0
        for block in self.blocks:
            if isinstance(block, Ragged) and not block.lengths.all():
                raise ValueError(f"{self.describe(first + int(block.lengths.argmin()))} has no vector")
            first += len(block)

    @property
    def total_rows(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def dimension(self) -> int:
        first = self.blocks[0]
        return int((first.flat if isinstance(first, Ragged) else first).shape[-1])

    @property
    def ragged(self) -> bool:
        return isinstance(self.blocks[0], Ragged)

    def describe(self, row: int) -> str:
        return f"document row {row}"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        first = 0
        for block in self.blocks:
            yield first, block
            first += len(block)


@runtime_checkable
class QueryVectors(Protocol):
    """Queries of one kind, and what is particular to scoring documents of that kind."""

    norms: np.ndarray  # upper bounds of the norms of all their vectors, query by query
    pairs_a_thread: int  # (query, document) pairs to give to `scores`, at least

    def __len__(self) -> int: ...
    def __getitem__(self, i: int | np.integer) -> np.ndarray:
        """The vectors of a query, float64 [U,D]."""
        ...

    def owner(self, vector: int) -> int:
        """Which query a vector belongs to."""
        ...

    def take(self, part: np.ndarray) -> QueryVectors: ...
    def parts(self) -> list[tuple[slice, Any]]:
        """The queries a few at a time, as a backend takes them."""
        ...

    def blocks(
        self, shard: Any, total_rows: int, depth: int, backend: Backend
    ) -> Iterator[tuple[np.ndarray, np.ndarray | Padded, np.ndarray]]:
        """(rows of the shard, their vectors as a backend takes them, upper bounds of the rows' largest norms)."""
        ...

    def errors(self, largest_norm: float, unit: float) -> np.ndarray:
        """How far a score computed with this unit roundoff may be from the exact one, for each query, float64 [Q]."""
        ...

    def scores(self, queries: np.ndarray, shard: Any, rows: np.ndarray) -> np.ndarray:
        """Scores of (query, row of the shard) pairs, computed in float64 [P]; the pairs of a query lie together."""
        ...


def search(
    queries: np.ndarray | Ragged,
    corpus: Corpus | Sequence[np.ndarray | Ragged],
    k: int,
    backend: Backend,
    progress: bool = False,
) -> SearchResult:
    """Finds the k best documents of float32 queries: [Q,D], or a list of vectors for each (Ragged).

    corpus: a ShardSet, or a list of blocks, [rows,V,D] or Ragged. Reads shard by shard; memory grows with Q x k and one
    shard. Raises ValueError for a NaN, an infinity, or vectors of another dimension, naming the row; RuntimeError if
    the backend loses documents.
    """
    there = InMemory(corpus) if isinstance(corpus, Sequence) else corpus
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    asked = query_vectors(queries, there)
    if there.ragged and not backend.lists:
        raise ValueError(f"search backend {backend.name!r} has no lists of vectors; this corpus needs xla, or auto")

    def look(part: np.ndarray, depth: int) -> tuple[Candidates, np.ndarray, int]:
        chosen = asked.take(part)
        candidates, largest_norm = find_candidates(chosen, there, depth, backend, progress)
        error = chosen.errors(largest_norm, backend.precision.unit(there.dimension))
        scored = _score_exactly(candidates, chosen, largest_norm, there, k, error)
        return candidates, error, scored

    least = LISTS_MARGIN if there.ragged and backend.precision != FLOAT32 else MARGIN
    return search_until_proven(
        look, len(asked), there.total_rows, k, backend.description, backend.precision.more, least
    )


def query_vectors(queries: np.ndarray | Ragged, corpus: Corpus) -> QueryVectors:
    """Queries as documents of the corpus are scored with them. Raises ValueError for a NaN, an infinity, or vectors of
    another dimension."""
    flat = queries.flat if isinstance(queries, Ragged) else queries
    if flat.dtype != np.float32 or flat.ndim != 2 or flat.shape[1] != corpus.dimension:
        raise ValueError(
            f"queries are {flat.dtype} {list(flat.shape)}; the documents want float32 [Q,{corpus.dimension}]: "
            "were both encoded with the same checkpoint?"
        )
    asked: QueryVectors
    if corpus.ragged:
        asked = VectorLists(queries if isinstance(queries, Ragged) else Ragged.from_stacked(queries[:, None]))
    else:
        single = queries.stacked()[:, 0] if isinstance(queries, Ragged) else queries
        asked = SingleVectors(np.ascontiguousarray(single))
    if not np.isfinite(asked.norms).all():
        query = asked.owner(int(np.argmin(np.isfinite(asked.norms))))
        raise ValueError(f"query {query} has a NaN, an infinity or a number too large")
    return asked


def find_candidates(
    queries: QueryVectors, corpus: Corpus, depth: int, backend: Backend, progress: bool
) -> tuple[Candidates, float]:
    """The `depth` best documents of each query in the backend's float32, and the largest norm of any vector."""
    candidates = empty_candidates(len(queries), depth)
    largest_norm = 0.0
    parts = queries.parts()
    with tqdm(total=corpus.total_rows, unit="doc", unit_scale=True, desc="search", disable=not progress) as bar:
        for block in _blocks(queries, corpus, depth, backend):
            largest_norm = max(largest_norm, block.largest_norm)
            for part, some in parts:
                found = block.top(some, depth)
                candidates.add(part, found._replace(documents=block.documents[found.documents]), 0)
            bar.update(len(block.documents))
    return candidates, largest_norm


def _blocks(queries: QueryVectors, corpus: Corpus, depth: int, backend: Backend) -> Iterator[Block]:
    """The documents, some at a time, with the backend; they are there already if the corpus keeps them."""
    if not isinstance(corpus, Kept):
        yield from _loaded(queries, corpus, depth, backend)
        return
    size = 0
    if backend.max_rows is not None:
        _, shard = next(iter(corpus))
        size = block_documents(corpus.total_rows, shard.shape[1], depth, backend)
    if size not in corpus.blocks:
        loaded = _loaded(queries, corpus, depth, backend)
        if in_turns(corpus, backend):
            yield from loaded
            return
        corpus.blocks[size] = list(loaded)
    yield from corpus.blocks[size]


def _loaded(queries: QueryVectors, corpus: Corpus, depth: int, backend: Backend) -> Iterator[Block]:
    if isinstance(backend, Xla) and not corpus.ragged:
        yield from pieces(corpus, backend)
        return
    for first_row, shard in corpus:
        for rows, block, norms in queries.blocks(shard, corpus.total_rows, depth, backend):
            require_finite(corpus, first_row + rows, norms)
            yield Block(first_row + rows, backend.load(block), float(norms.max()))


def _score_exactly(
    candidates: Candidates, queries: QueryVectors, largest_norm: float, corpus: Corpus, k: int, error: np.ndarray
) -> int:
    """Replaces the backend's scores, which may be `error` [Q] below the exact ones, by these, and sorts the candidates
    by the tie rule, in place; returns how many it scored. Those that cannot be among the best k are not: the k that
    the backend likes best come first, then what may reach the lowest of them; others have -inf."""
    n_queries, depth = candidates.scores.shape
    scores = np.full((n_queries, depth), -np.inf, np.float32)
    first = np.ones(scores.shape, bool)
    if k < depth:
        first[:] = False
        np.put_along_axis(first, np.argpartition(-candidates.scores, k - 1, axis=1)[:, :k], True, axis=1)
    errors = queries.errors(largest_norm, WIDE_UNIT)
    scored = score_pairs(scores, first, candidates.rows, queries, errors, corpus)
    lowest = np.where(first, scores, np.inf).min(axis=1, keepdims=True)
    at_most = (candidates.scores.astype(np.float64) + error[:, None]).astype(np.float32)  # rounding is monotone
    scored += score_pairs(scores, ~first & (at_most >= lowest), candidates.rows, queries, errors, corpus)
    candidates.scores[:], candidates.rows[:] = sorted_by_rule(scores, candidates.rows)
    return scored


def score_candidates(
    queries: QueryVectors, rows: np.ndarray, corpus: Corpus, k: int, largest_norm: float
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of some rows [Q,C] (-1: none) by exact scores and the tie rule: scores [Q,k], rows [Q,k]. Each query
    has k rows. largest_norm: at least that of any vector of the corpus."""
    scores = np.full(rows.shape, -np.inf, np.float32)
    every = np.ones(rows.shape, bool)
    score_pairs(scores, every, rows, queries, queries.errors(largest_norm, WIDE_UNIT), corpus)
    found = sorted_by_rule(scores, rows)
    return found[0][:, :k], found[1][:, :k]


def sorted_by_rule(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows [Q,n], score descending, then row ascending; what has no score (-inf) comes last, in no order."""
    order = np.argsort(-scores, axis=1)  # ten times faster than a sort by two keys, which few queries need
    found = np.take_along_axis(scores, order, axis=1)
    tied = ((found[:, 1:] == found[:, :-1]) & (found[:, 1:] > -np.inf)).any(axis=1)
    order[tied] = np.lexsort((rows[tied], -scores[tied]), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def score_pairs(
    scores: np.ndarray, which: np.ndarray, rows: np.ndarray, queries: QueryVectors, errors: np.ndarray, corpus: Corpus
) -> int:
    """Writes the exact scores of some (query, row) pairs of [Q,depth], row -1 being none; returns how many. errors: how
    far a float64 one may be from them.

    A float64 sum may be off by a little. Where that leaves two float32 numbers possible, the products (exact in
    float64) are summed by math.fsum, so that the result is a function of the vectors alone.
    """
    query_of, column_of = np.nonzero(which & (rows >= 0))
    if not len(query_of):
        return 0  # nothing to read the corpus for
    row_of = rows[query_of, column_of]

    def score(first_row: int, shard: Any, pairs: np.ndarray) -> None:
        query, there = query_of[pairs], row_of[pairs] - first_row
        found, error = queries.scores(query, shard, there), errors[query]
        exact = (found + error).astype(np.float32)
        for i in np.flatnonzero(exact != (found - error).astype(np.float32)):
            exact[i] = exact_score(queries[query[i]], shard[there[i]].astype(np.float64))
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
