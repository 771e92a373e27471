"""Compares the exact search of a store with jaxret's: the passages, except for ties, and the scores must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxret.data.formats import QuerySource
from jaxret.export.round_trip import TIE
from jaxret.export.stores.vector_store import VectorStore
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.in_memory import vectors_of
from jaxret.types import Ragged

_QUERY_VECTORS = 32  # vectors of a stored passage that are used as a query under late interaction


def sample_queries(encoded_corpus: EncodedCorpus, sample: int) -> Ragged:
    """Return stored vectors of evenly spread rows as queries. Under late interaction, a query has a list of vectors."""
    rows = np.unique(np.linspace(0, encoded_corpus.total_rows - 1, sample).astype(np.int64))
    limit = _QUERY_VECTORS if encoded_corpus.ragged else 1
    lists = [vectors[:limit].astype(np.float32) for vectors in vectors_of(encoded_corpus, rows)]
    return Ragged(np.concatenate(lists), np.cumsum([0, *map(len, lists)]))


def encode_queries(searcher: Searcher, queries: QuerySource, sample: int) -> Ragged:
    """Return the vectors of the first `sample` queries."""
    _, vectors = searcher.encode(queries.read()[:sample])
    assert isinstance(vectors, Ragged)
    return vectors


def compare_store(searcher: Searcher, store: VectorStore, queries: Ragged, k: int) -> dict[str, Any]:
    """Compare the k best passages of queries. Return {"queries", "k", "tied", "largest_difference"}; "tied" is the
    number of passages whose rank differs among equal scores.

    Args:
        searcher: searcher of the exported corpus.
        store: the filled table.
        queries: vectors of queries.
        k: number of passages for each query.

    Raises:
        ValueError: a query has another passage, or a score differs by more than rounding.
    """
    queries = queries.astype(store.query_dtype).astype(np.float32)
    k = min(k, searcher.encoded_corpus.total_rows)
    result, our_ids = searcher.nearest(queries, k)
    hits = store.search(list(queries), k)
    rows = rows_of_ids(searcher.encoded_corpus, {key for ranking in hits for key, _ in ranking})
    for number, ranking in enumerate(hits):
        if problem := _problem([key for key, _ in ranking], rows, k):
            raise ValueError(f"{store.address}: for query {number} {problem}; the export is not usable")
    exact = np.array(searcher.scores(queries, [[rows[key] for key, _ in ranking] for ranking in hits]))
    store_scores = np.array([[score for _, score in ranking] for ranking in hits])
    size = max(float(np.abs(result.scores).max()), 1.0)
    ids_differ = np.array(our_ids) != np.array([[key for key, _ in ranking] for ranking in hits])
    differs = np.abs(exact - result.scores) > TIE * size
    if differs.any():
        query, index = np.argwhere(differs)[0].tolist()
        raise ValueError(
            f"{store.address}: for query {query} the passage at rank {index + 1} is {hits[query][index][0]!r} with "
            f"score {exact[query, index]:.6g}, in jaxret {our_ids[query][index]!r} with "
            f"{result.scores[query, index]:.6g}. {int(differs.any(axis=1).sum())} of {len(hits)} queries differ; the "
            "export is not usable"
        )
    largest = float(np.abs(exact - store_scores).max()) / size
    if not largest <= TIE:
        raise ValueError(
            f"{store.address}: the passages are the same, but scores differ by {largest:.1e}, more than {TIE:.0e}; the "
            "export is not usable"
        )
    return {"queries": len(hits), "k": k, "tied": int(ids_differ.sum()), "largest_difference": largest}


def _problem(ids: Sequence[str], rows: dict[str, int], k: int) -> str:
    if len(set(ids)) != len(ids):
        return f"the passage {next(key for key in ids if ids.count(key) > 1)!r} comes twice"
    if unknown := [key for key in ids if key not in rows]:
        return f"the passage {unknown[0]!r} comes, which the corpus does not have"
    return "" if len(ids) == k else f"{len(ids)} passages come instead of {k}"


def rows_of_ids(encoded_corpus: EncodedCorpus, ids: set[str]) -> dict[str, int]:
    """Return {id: row} for those of `ids` that are in the corpus."""
    blocks = encoded_corpus.id_blocks()
    return {key: row for start, block in blocks for row, key in enumerate(block, start) if key in ids}
