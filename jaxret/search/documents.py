"""Rank documents by their best passage: the score of document ID is the highest one of passages ID#0, ID#1, ..."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import numpy as np

from jaxret.data.chunks import CHUNK_SEPARATOR, document_id, joined_chunks
from jaxret.data.records import Passage
from jaxret.search.proof import SearchResult
from jaxret.types import TextVectors

_DEPTH_FACTOR = 4  # factor of the number of passages in the next search, if too few documents were found
_PASSAGES_AT_ONCE = 16  # passages of a document that are read at a time


def best_documents(
    search: Callable[[TextVectors, int], SearchResult],
    ids: Callable[[np.ndarray], Sequence[str]],
    vectors: TextVectors,
    k: int,
    passages: int,
) -> SearchResult:
    """Return the row of the best passage of each of the k best documents, or of all documents if there are fewer.

    The number of passages in a search grows until they belong to k documents. All other passages rank lower, so the
    documents are exactly the best ones. Documents with equal scores are in the order of their first rows.

    Args:
        search: an exact search, which returns the best rows of each query.
        ids: function that returns the passage ids of rows.
        vectors: the query vectors.
        k: documents to return for each query.
        passages: number of passages of the corpus.
    """
    rows: list[np.ndarray] = [np.zeros(0, np.int64)] * len(vectors)
    scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(vectors)
    pending_queries, depth, rounds, scored_pairs = np.arange(len(vectors)), min(2 * k, passages), [], 0
    while True:
        result = search(vectors.take(pending_queries), depth)
        rounds.append(len(pending_queries))
        scored_pairs += result.scored_pairs
        documents = [document_id(passage) for passage in ids(result.rows.reshape(-1))]
        incomplete_queries = []
        for number, query in enumerate(pending_queries.tolist()):
            start = number * result.rows.shape[1]
            first: dict[str, int] = {}
            for column, document in enumerate(documents[start : start + result.rows.shape[1]]):
                first.setdefault(document, column)
            columns = np.array(list(first.values())[:k], np.int64)
            rows[query], scores[query] = result.rows[number][columns], result.scores[number][columns]
            if len(columns) < k:
                incomplete_queries.append(query)
        if not incomplete_queries or depth == passages:
            return SearchResult(np.stack(scores), np.stack(rows), result.backend, tuple(rounds), scored_pairs)
        pending_queries, depth = np.array(incomplete_queries), min(_DEPTH_FACTOR * depth, passages)


def join_passages(
    read: Callable[[Collection[str]], dict[str, Passage]], ids: Collection[str], deleted_ids: Collection[str] = ()
) -> dict[str, Passage]:
    """Return documents by their ids, with the texts of their passages (`joined_chunks`).

    Some passages of a document may be empty. It ends where _PASSAGES_AT_ONCE consecutive passages have no text.

    Args:
        read: function that returns passages by id; a passage that does not exist has no text.
        ids: ids of documents.
        deleted_ids: ids of passages that a document lacks, although `read` returns their texts.
    """
    parts: dict[str, list[Passage | None]] = {key: [] for key in ids}  # None for a deleted passage
    unfinished_keys, start = list(parts), 0
    while unfinished_keys:  # passages are numbered from 0, without gaps
        numbers = range(start, start + _PASSAGES_AT_ONCE)
        names = {f"{key}{CHUNK_SEPARATOR}{i}": key for key in unfinished_keys for i in numbers}
        names |= {key: key for key in unfinished_keys if start == 0}  # documents that were not split
        passages = {name: passage for name, passage in read(names).items() if passage.text}
        for name, passage in passages.items():
            parts[names[name]].append(None if name in deleted_ids else passage)
        start += _PASSAGES_AT_ONCE
        unfinished_keys = list(dict.fromkeys(key for name, key in names.items() if name in passages and name != key))
    return {key: _joined_passage(key, passages) for key, passages in parts.items()}


def _joined_passage(key: str, parts: Sequence[Passage | None]) -> Passage:
    """Return a document. Passages with a deleted one (None) between them share no words."""
    runs = [[part for part in run if part] for _, run in groupby(parts, lambda part: part is None)]
    texts = [joined_chunks([part.text for part in run]) for run in runs if run]
    title = next((part.title for part in parts if part), "")
    return Passage(key, " ".join(texts), title)
