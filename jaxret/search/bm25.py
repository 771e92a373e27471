"""BM25: the word-matching baseline, and the first source of hard negatives."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.formats import hash_id
from jaxret.data.records import Passage, Query
from jaxret.parallel.progress import with_progress
from jaxret.search.bm25_index import IDS, bm25s_module, tokenize_words, write_bm25_index
from jaxret.search.bm25_settings import BM25Settings


class BM25:
    """A BM25 index that is mapped from disk. Row i is the i-th passage of the corpus."""

    def __init__(self, folder: Path, settings: BM25Settings) -> None:
        """Open an index that `write_bm25_index` wrote with these settings. Raises ValueError if an id occurs twice."""
        self.settings = settings
        self._index = bm25s_module().BM25.load(str(folder), mmap=True, show_progress=False)
        self._ids = _LineFile(folder / IDS)

    @classmethod
    def of(cls, passages: Iterable[Passage], settings: BM25Settings | None = None, progress: bool = False) -> BM25:
        """Return an index of passages in temporary files, which are deleted as soon as they are mapped.

        Raises:
            ValueError: an id occurs twice, or no passage has a word.
        """
        with tempfile.TemporaryDirectory(prefix="jaxret-") as folder:  # mapped files can be read after their deletion
            settings = settings or BM25Settings()
            write_bm25_index(Path(folder), passages, settings, progress)
            return cls(Path(folder), settings)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def bytes_per_passage(self) -> float:
        """Return the mean number of bytes of a passage's postings: a row and a score for each of its words."""
        scores: dict[str, Any] = self._index.scores
        return sum(scores[name].nbytes for name in ("data", "indices", "indptr")) / len(self)

    def search(self, queries: Sequence[Query], k: int, progress: bool = False) -> dict[str, list[tuple[str, float]]]:
        """Return query id -> at most `k` pairs (passage id, score); score descending, then row ascending.

        A passage that shares no word with the query is never returned, so a ranking may be shorter than `k`, or empty.

        Raises:
            ValueError: `k` is below 1, or a query id occurs twice.
        """
        if k < 1:
            raise ValueError(f"k is {k}; retrieve at least one passage")
        distinct: set[str] = set()
        for query in queries:
            if query.id in distinct:
                raise ValueError(f"query id {query.id!r} occurs twice; ids must be distinct")
            distinct.add(query.id)
        words = self.words(queries)
        bar = with_progress(zip(queries, words), "BM25 search", len(queries), "query", progress)
        return {query.id: self.rank(query_words, k) for query, query_words in bar}

    def words(self, queries: Sequence[Query]) -> list[list[str]]:
        """Return the words of each query, in the form in which those of passages are counted (`tokenize_words`)."""
        texts = (query.text for query in queries)
        words: list[list[str]] = tokenize_words(texts, self.settings.language, False)
        return words

    def rank(self, words: list[str], k: int) -> list[tuple[str, float]]:
        """Return the ids and scores of the k best passages for the words of a query."""
        rows, scores = self.top_rows(words, k)
        return list(zip(self.ids(rows), scores.tolist(), strict=True))

    def top_rows(self, words: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and scores of the k best passages for the words of a query.

        Only scores above 0 count; score descending, then row ascending.
        """
        # bm25s's own search is not used: the order of its ties depends on its backend, and it adds passages with
        # score 0.
        scores = self.all_scores(words)
        rows = np.flatnonzero(scores > 0)
        if len(rows) > k:
            kth = np.partition(scores[rows], -k)[-k]
            rows = rows[scores[rows] >= kth]  # more than k if others tie with the k-th; the stable sort decides
        rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
        return rows, scores[rows]

    def ids(self, rows: np.ndarray) -> list[str]:
        """Return the ids of passages by their rows."""
        return self._ids.lines(rows)

    def scores(self, query: Query, ids: Collection[str]) -> dict[str, float]:
        """Return the scores of passages by id; 0 without a common word. Ids that the corpus lacks are left out."""
        rows = self.rows(ids)
        if not rows:
            return {}
        (words,) = self.words([query])
        scores = self.all_scores(words)
        return {key: float(scores[row]) for key, row in rows.items()}

    def rows(self, ids: Collection[str]) -> dict[str, int]:
        """Return the rows of passages by id; ids that the corpus lacks are left out."""
        return self._ids.find(ids)

    def missing_ids(self, ids: set[str]) -> set[str]:
        """Return the ids that no passage of the corpus has."""
        return ids - self.rows(ids).keys()

    def all_scores(self, words: list[str]) -> np.ndarray:
        """Return the score of every passage, [passages] float32."""
        scores: np.ndarray = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        return scores


class _LineFile:
    """A mapped file whose lines can be found by number and by text. It needs 20 bytes of memory for each line."""

    def __init__(self, path: Path) -> None:
        """Map a file that is not empty. Raises ValueError if a line occurs twice."""
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ends = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))
        self._ends = ends.astype(np.uint32 if len(self._bytes) < 2**32 else np.uint64)
        self._require_distinct()

    def __len__(self) -> int:
        return len(self._ends)

    def lines(self, rows: np.ndarray) -> list[str]:
        return [self._line(int(row)) for row in rows]

    def _line(self, row: int) -> str:
        start = int(self._ends[row - 1]) + 1 if row else 0
        return self._bytes[start : int(self._ends[row])].decode()

    @cached_property
    def _hashes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of the lines, ascending, and the rows of these lines."""
        hashes = np.fromiter((hash_id(self._line(row)) for row in range(len(self))), np.uint64, len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order.astype(np.int32)

    def find(self, texts: Collection[str]) -> dict[str, int]:
        hashes, order = self._hashes
        keys = list(texts)
        key_hashes = np.array([hash_id(key) for key in keys], np.uint64)
        starts, ends = (np.searchsorted(hashes, key_hashes, side) for side in ("left", "right"))
        candidates = ((key, order[start:end]) for key, start, end in zip(keys, starts, ends, strict=True))
        return {key: int(row) for key, rows in candidates for row in rows if self._line(int(row)) == key}

    def _require_distinct(self) -> None:
        """Raise ValueError if a line occurs twice."""
        hashes, order = self._hashes
        for position in np.flatnonzero(hashes[1:] == hashes[:-1]):
            first, second = self.lines(order[position : position + 2])
            if first == second:
                raise ValueError(f"passage id {first!r} occurs twice; ids must be distinct")
