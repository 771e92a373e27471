"""BM25: the word-matching baseline, and the first source of hard negatives."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import Stemmer
from tqdm import tqdm

from jaxret.data.records import Passage, Query

# Of bm25s's two lists for English the longer one: it also has the words that questions are made of (what, how, does),
# which on question data sets is worth 0.01 to 0.02 of nDCG@10.
_STOPWORDS = "english_plus"


def _bm25s() -> ModuleType:
    """Imported at first use, because importing it starts JAX: jax.distributed.initialize() must have run by then."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG, whatever the program's level is
    return bm25s


class BM25:
    """An index of passages in memory, with Lucene's formula and English (Snowball) stemming.

    Args:
        passages: the corpus; `title + " " + text` is indexed.
        k1, b: term saturation and length normalisation. The defaults are Anserini's, as in BEIR's baselines.
        progress: show progress bars.
    Raises:
        ValueError: an id occurs twice, or no passage has a word.
    """

    def __init__(self, passages: Sequence[Passage], k1: float = 0.9, b: float = 0.4, progress: bool = False) -> None:
        self._ids = [passage.id for passage in passages]
        _require_distinct("passage", self._ids)
        tokens = _tokenize((f"{passage.title} {passage.text}" for passage in passages), True, progress)
        if not tokens.vocab:
            raise ValueError(f"no word in any of the {len(self._ids)} passages; give a corpus with text")
        self._rows: dict[str, int] | None = None  # made at the first `scores`
        self._index = _bm25s().BM25(k1=k1, b=b)
        self._index.index(tokens, create_empty_token=False, show_progress=progress)

    def search(self, queries: Sequence[Query], k: int, progress: bool = False) -> dict[str, list[tuple[str, float]]]:
        """Return query id -> up to `k` (passage id, score), by descending score, ties by ascending corpus row.

        Passages that share no word with the query are not retrieved, so a ranking may be shorter than `k`, or empty.

        Raises:
            ValueError: `k` is below 1, or a query id occurs twice.
        """
        if k < 1:
            raise ValueError(f"k is {k}; retrieve at least one passage")
        _require_distinct("query", [query.id for query in queries])
        tokens = _tokenize((query.text for query in queries), False, progress)
        bar = tqdm(zip(queries, tokens), "BM25 search", len(queries), disable=not progress)
        return {query.id: self._rank(words, k) for query, words in bar}

    def scores(self, query: Query, ids: Iterable[str]) -> dict[str, float]:
        """Return the scores of passages by id, 0 without a shared word; ids that the corpus lacks are left out."""
        if self._rows is None:
            self._rows = {key: row for row, key in enumerate(self._ids)}
        rows = {key: self._rows[key] for key in ids if key in self._rows}
        if not rows:
            return {}
        (words,) = _tokenize([query.text], False, False)
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        return {key: float(scores[row]) for key, row in rows.items()}

    def _rank(self, words: list[str], k: int) -> list[tuple[str, float]]:
        # Not bm25s's own retrieve: its top-k breaks ties by its backend, and fills up with zeros.
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))  # [passages] float32
        rows = _top_rows(scores, k)
        return [(self._ids[row], score) for row, score in zip(rows.tolist(), scores[rows].tolist())]


def _top_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """Rows of the `k` highest scores above 0: score descending, then row ascending."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:
        kth = np.partition(scores[rows], -k)[-k]
        rows = rows[scores[rows] >= kth]  # more than k if others tie with the k-th; the stable sort decides
    return rows[np.argsort(-scores[rows], kind="stable")[:k]]


def _tokenize(texts: Iterable[str], return_ids: bool, progress: bool) -> Any:
    stemmer = Stemmer.Stemmer("english")
    return _bm25s().tokenize(
        texts, stopwords=_STOPWORDS, stemmer=stemmer, return_ids=return_ids, show_progress=progress
    )


def _require_distinct(kind: str, ids: Sequence[str]) -> None:
    distinct: set[str] = set()
    for key in ids:
        if key in distinct:
            raise ValueError(f"{kind} id {key!r} occurs twice; ids must be distinct")
        distinct.add(key)
