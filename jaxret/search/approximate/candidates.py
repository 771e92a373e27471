"""Approximate search of passages with many vectors. They are ranked by one proxy vector each (`proxies.py`), and the
first N are scored exactly.

All results have exact scores. Passages that are not candidates are missed; `compare_with_exact` measures how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxret.index.row_subset import RowSubset
from jaxret.search.approximate.proxies import PROXIES, Proxy, query_proxies
from jaxret.search.backends.select import Backend
from jaxret.search.proof import PASS_CANDIDATES, SearchResult, recall_at
from jaxret.search.rounding import upper_norms
from jaxret.search.search_options import CandidateSpec
from jaxret.search.vectors.exact import find_candidates, query_vectors, score_candidates, search
from jaxret.search.vectors.in_memory import InMemoryCorpus, StoredCorpus, hold_in_memory, require_finite_vectors
from jaxret.search.vectors.single_vector import SingleVectors
from jaxret.types import Ragged

PROXY_BYTES = 2**26  # proxy vectors that are computed at a time
SAMPLE_QUERIES = 50  # number of queries, evenly spread, that are also searched exactly to measure recall


class ProxyShard(RowSubset):
    """The proxies [rows,1,size] of the passages `rows` of a shard, computed on access."""

    def __init__(self, corpus: ProxyCorpus, first: int, shard: Any, rows: np.ndarray) -> None:
        self._corpus, self._first, self._shard, self._rows = corpus, first, shard, rows
        self.shape = (len(rows), 1, corpus.dimension)

    def __getitem__(self, key: Any) -> np.ndarray:
        rows = self._rows[key]
        proxies = np.empty((len(rows), 1, self._corpus.dimension), np.float32)
        for number, row in enumerate(rows.tolist()):
            vectors = np.asarray(self._shard[row], np.float32)
            self._corpus.check_norms(self._first + row, vectors)
            proxies[number, 0] = self._corpus.proxy.passage(vectors)
        return proxies


class ProxyCorpus:
    """A corpus of proxies: one vector for each passage.

    `largest_norm` is an upper bound of the norms of all passage vectors that were read so far.
    """

    def __init__(self, corpus: StoredCorpus, proxy: Proxy) -> None:
        self.proxy, self.dimension, self.total_rows, self.ragged = proxy, proxy.size, corpus.total_rows, False
        self.describe, self.ids = corpus.describe, corpus.ids
        self.largest_norm = 0.0
        self._corpus = corpus

    def check_norms(self, row: int, vectors: np.ndarray) -> None:
        """Update `largest_norm` with the vectors [V,D] of a row. Raises ValueError if one of them is not finite or too
        large."""
        norms = upper_norms(vectors).max(keepdims=True)  # NaN if one of them is NaN
        require_finite_vectors(self, np.array([row]), norms)
        self.largest_norm = max(self.largest_norm, float(norms[0]))

    def __iter__(self) -> Iterator[tuple[int, ProxyShard]]:
        size = max(1, PROXY_BYTES // (4 * self.dimension))
        for first, shard in self._corpus:
            for start in range(0, len(shard), size):
                rows = np.arange(start, min(start + size, len(shard)))
                yield first + start, ProxyShard(self, first, shard, rows)


@dataclass(frozen=True)
class CandidateGenerator:
    """A corpus whose proxies find the candidates of a search; they are in memory if they fit (`in_memory.py`)."""

    spec: CandidateSpec
    corpus: ProxyCorpus
    proxies: InMemoryCorpus | StoredCorpus
    backend: Backend

    @classmethod
    def open(
        cls, corpus: StoredCorpus, spec: CandidateSpec, backend: Backend, many: bool = False
    ) -> CandidateGenerator:
        """Return a generator. Raises ValueError if passages have one vector, because proxies would save nothing.

        Args:
            spec: proxy and number of candidates.
            backend: the backend that ranks proxies.
            many: whether there will be many searches; then the proxies are kept in memory if they fit.
        """
        spec.require_several(None if corpus.ragged else next(iter(corpus))[1].shape[1])
        proxies = ProxyCorpus(corpus, PROXIES[spec.proxy].of(corpus.dimension))
        return cls(spec, proxies, hold_in_memory(proxies) if many else proxies, backend)

    @property
    def count(self) -> int:
        """Return the number of candidates of a query."""
        return min(self.spec.passages, self.corpus.total_rows)

    @property
    def description(self) -> str:
        """Return a line with the backend and the proxy."""
        return f"{self.backend.description}, {self.count:,} candidates a query by {self.spec.proxy}"

    def __call__(self, vectors: Ragged, corpus: StoredCorpus, k: int, progress: bool = False) -> SearchResult:
        """Return the best k candidates of each query, by exact scores, then by row.

        Args:
            vectors: the query vectors.
            corpus: the passages that `open` got.
            k: passages to return for each query.
            progress: whether to show a bar.
        """
        self.spec.require(k)
        count = self.count
        step = max(1, PASS_CANDIDATES // count)
        starts = range(0, len(vectors), step)
        results = [
            self._search_part(vectors.part(start, min(start + step, len(vectors))), corpus, count, progress)
            for start in starts
        ]
        scores, rows = (np.concatenate(parts)[:, :k] for parts in zip(*results, strict=True))
        return SearchResult(scores, rows, self.description, (len(vectors),), len(vectors) * count)

    def _search_part(
        self, vectors: Ragged, corpus: StoredCorpus, count: int, progress: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        query_lists = query_vectors(vectors, corpus)
        proxy_queries = SingleVectors(query_proxies(self.corpus.proxy, vectors))
        candidates, _ = find_candidates(proxy_queries, self.proxies, count, self.backend, progress)
        return score_candidates(query_lists, candidates.rows, corpus, count, self.corpus.largest_norm)


def compare_with_exact(
    spec: CandidateSpec, result: SearchResult, vectors: Ragged, corpus: StoredCorpus, backend: Backend
) -> dict[str, Any]:
    """Return the recall of an approximate search as JSON.

    SAMPLE_QUERIES of the queries are searched exactly. R@d is the share of the d best exact results that are among the
    d best approximate results.

    Args:
        spec: proxy and number of candidates.
        result: the result of the approximate search.
        vectors: the query vectors.
        backend: the backend of the exact search.
    """
    sample_rows = np.unique(np.linspace(0, len(vectors) - 1, min(SAMPLE_QUERIES, len(vectors))).astype(np.int64))
    k = result.rows.shape[1]
    exact = search(vectors.take(sample_rows), corpus, k, backend)
    depths = sorted({min(k, depth) for depth in (1, 10, 100, k)})
    recalls = {str(depth): recall_at(result.scores[sample_rows], exact.scores, depth) for depth in depths}
    return {"candidates": str(spec), "recall_of_exact": recalls, "queries_compared": len(sample_rows)}


def describe_recall(comparison: Mapping[str, Any]) -> str:
    """Return a line about the recall of an approximate search."""
    recalls = ", ".join(f"R@{depth} {value:.4f}" for depth, value in comparison["recall_of_exact"].items())
    return (
        f"approximate ({comparison['candidates']}): of what exact search finds, {recalls} was found, "
        f"by {comparison['queries_compared']:,} of the queries"
    )
