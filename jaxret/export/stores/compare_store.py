"""Compare the exact search of a store with jaxret's: the same passages, up to ties, with the same scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxret.data.formats import QuerySource
from jaxret.export.stores.vector_store import VectorStore
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.search.in_memory import vectors_of
from jaxret.search.searcher import Searcher
from jaxret.types import Ragged

TIE = 1e-5  # relative to scores of about 1: float32's rounding may order closer scores differently
_QUERY_VECTORS = 32  # of a stored passage, where a query has a list of vectors


def sample_queries(encoded_corpus: EncodedCorpus, sample: int) -> Ragged:
    """Return stored vectors as queries, of rows that are evenly spread; lists of them under late interaction."""
    rows = np.unique(np.linspace(0, encoded_corpus.total_rows - 1, sample).astype(np.int64))
    most = _QUERY_VECTORS if encoded_corpus.ragged else 1
    lists = [vectors[:most].astype(np.float32) for vectors in vectors_of(encoded_corpus, rows)]
    return Ragged(np.concatenate(lists), np.cumsum([0, *map(len, lists)]))


def encode_queries(searcher: Searcher, queries: QuerySource, sample: int) -> Ragged:
    """Return the vectors of the first queries."""
    _, vectors = searcher.encode(queries.read()[:sample])
    assert isinstance(vectors, Ragged)
    return vectors


def compare_store(searcher: Searcher, store: VectorStore, queries: Ragged, k: int) -> dict[str, Any]:
    """Compare the k best passages of queries; return {"queries", "k", "tied", "largest_difference"}, the third counts
    the passages that are others, or elsewhere, among equal scores.

    Args:
        searcher: of the corpus that was exported.
        store: the filled table.
        queries: vectors of queries.
        k: passages of each.

    Raises ValueError naming the first query with another passage, or a score that differs by more than rounding.
    """
    queries = queries.astype(store.query_dtype).astype(np.float32)
    k = min(k, searcher.encoded_corpus.total_rows)
    result, our_ids = searcher.nearest(queries, k)
    hits = store.search(list(queries), k)
    rows = rows_of_ids(searcher.encoded_corpus, {key for each in hits for key, _ in each})
    for number, each in enumerate(hits):
        if problem := _problem([key for key, _ in each], rows, k):
            raise ValueError(f"{store.place}: for query {number} {problem}; the export is not usable")
    exact = np.array(searcher.scores(queries, [[rows[key] for key, _ in each] for each in hits]))
    theirs = np.array([[score for _, score in each] for each in hits])
    size = max(float(np.abs(result.scores).max()), 1.0)
    other = np.array(our_ids) != np.array([[key for key, _ in each] for each in hits])
    wrong = np.abs(exact - result.scores) > TIE * size
    if wrong.any():
        query, place = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{store.place}: for query {query} the passage at rank {place + 1} is {hits[query][place][0]!r} with score "
            f"{exact[query, place]:.6g}, in jaxret {our_ids[query][place]!r} with {result.scores[query, place]:.6g} "
            f"({int(wrong.any(axis=1).sum())} of {len(hits)} queries differ); the export is not usable"
        )
    largest = float(np.abs(exact - theirs).max()) / size
    if not largest <= TIE:
        raise ValueError(
            f"{store.place}: the passages are the same, but scores differ by {largest:.1e}, more than {TIE:.0e}; the "
            "export is not usable"
        )
    return {"queries": len(hits), "k": k, "tied": int(other.sum()), "largest_difference": largest}


def _problem(ids: Sequence[str], rows: dict[str, int], k: int) -> str:
    if len(set(ids)) != len(ids):
        return f"the passage {next(key for key in ids if ids.count(key) > 1)!r} comes twice"
    if unknown := [key for key in ids if key not in rows]:
        return f"the passage {unknown[0]!r} comes, which the corpus does not have"
    return "" if len(ids) == k else f"{len(ids)} passages come instead of {k}"


def rows_of_ids(encoded_corpus: EncodedCorpus, ids: set[str]) -> dict[str, int]:
    """Return the rows of some ids; what the corpus does not have is left out."""
    return {
        key: start + place
        for start, block in encoded_corpus.id_blocks()
        for place, key in enumerate(block)
        if key in ids
    }
