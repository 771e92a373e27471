"""Rank documents by their best passage: of passages ID#0, ID#1, ..., the score of ID is the highest of theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxret.data.chunks import CHUNK_SEPARATOR, document_id, joined_chunks
from jaxret.data.records import Passage
from jaxret.search.proof import SearchResult
from jaxret.types import TextVectors

_DEEPER = 4  # times as many passages, for queries that found too few documents
_PASSAGES = 16  # of a document, that are read at a time


def best_documents(
    search: Callable[[TextVectors, int], SearchResult],
    ids: Callable[[np.ndarray], Sequence[str]],
    vectors: TextVectors,
    k: int,
    passages: int,
) -> SearchResult:
    """Return the row of the best passage of each of the k best documents, or of all documents if there are fewer.

    It searches for more and more passages until they are of k documents. As all passages that are left out come later,
    the documents are exactly the best ones; of equal scores the document of the first row comes first.

    Args:
        search: returns the best rows of each query: an exact search.
        ids: returns the passages' ids of rows.
        vectors: of the queries.
        k: documents for each query.
        passages: how many are searched.
    """
    rows: list[np.ndarray] = [np.zeros(0, np.int64)] * len(vectors)
    scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(vectors)
    pending_queries, depth, rounds, scored_pairs = np.arange(len(vectors)), min(2 * k, passages), [], 0
    while True:
        result = search(vectors.take(pending_queries), depth)
        rounds.append(len(pending_queries))
        scored_pairs += result.scored_pairs
        documents = [document_id(passage) for passage in ids(result.rows.reshape(-1))]
        few = []
        for place, query in enumerate(pending_queries.tolist()):
            start = place * result.rows.shape[1]
            first: dict[str, int] = {}
            for column, document in enumerate(documents[start : start + result.rows.shape[1]]):
                first.setdefault(document, column)
            columns = np.array(list(first.values())[:k], np.int64)
            rows[query], scores[query] = result.rows[place][columns], result.scores[place][columns]
            if len(columns) < k:
                few.append(query)
        if not few or depth == passages:
            return SearchResult(np.stack(scores), np.stack(rows), result.backend, tuple(rounds), scored_pairs)
        pending_queries, depth = np.array(few), min(_DEEPER * depth, passages)


def join_passages(read: Callable[[Collection[str]], dict[str, Passage]], ids: Collection[str]) -> dict[str, Passage]:
    """Return documents by their ids, with the texts of their passages (`joined_chunks`).

    A document ends where as many passages in a row as are read at a time have no text: a few may be empty.

    Args:
        read: returns passages by id; one that does not exist has no text.
        ids: of documents.
    """
    parts: dict[str, list[Passage]] = {key: [] for key in ids}
    unfinished_keys, start = list(parts), 0
    while unfinished_keys:  # their numbers begin with 0, and none is left out
        names = {f"{key}{CHUNK_SEPARATOR}{i}": key for key in unfinished_keys for i in range(start, start + _PASSAGES)}
        names |= {key: key for key in unfinished_keys if start == 0}  # that were not split
        passages = {name: passage for name, passage in read(names).items() if passage.text}
        for name, passage in passages.items():
            parts[names[name]].append(passage)
        start += _PASSAGES
        unfinished_keys = list(dict.fromkeys(key for name, key in names.items() if name in passages and name != key))
    return {
        key: Passage(key, joined_chunks([part.text for part in own]), own[0].title if own else "")
        for key, own in parts.items()
    }
