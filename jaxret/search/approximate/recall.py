"""Recall of an approximate search: the share of the best passages of exact search that it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.search.approximate.index_files import read_index_manifest
from jaxret.search.proof import SearchResult, recall_at
from jaxret.storage.atomic import sha256_bytes, with_digest, write_json
from jaxret.types import SparseRows

DEPTHS = (1, 10, 100)  # values of k for which recall is measured
GOOD_RECALL = 0.95  # recall@10 that parameters need to become the default


@dataclass(frozen=True)
class RecallQueries:
    """Query vectors with which recall is measured."""

    vectors: Any  # [Q,D] float32, or SparseRows
    source: str  # where they come from, in words
    # If passages are used as queries: the row of each, which is left out of the results of both searches.
    rows: np.ndarray | None = None

    def digest(self) -> str:
        """Return the SHA-256 of the vectors."""
        vectors = self.vectors
        arrays = (vectors.words, vectors.weights, vectors.offsets) if isinstance(vectors, SparseRows) else (vectors,)
        return sha256_bytes(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def draw_rows(encoded_corpus: EncodedCorpus, count: int, random: np.random.Generator) -> np.ndarray:
    """Return the rows of `count` random passages, or of all of a smaller corpus, ascending."""
    total = encoded_corpus.total_rows
    return np.sort(random.choice(total, min(count, total), replace=False, shuffle=False))


def record_recall(
    folder: Path,
    queries: RecallQueries,
    total_rows: int,
    exact: Callable[[int], SearchResult],
    trials: Mapping[str, Callable[[int], SearchResult]],
) -> dict[str, Any]:
    """Measure an index's recall at DEPTHS and its milliseconds for each query; write them into its manifest.

    Recall@k is the share of the k best passages of exact search that a search for k finds. Passages with equal scores
    count alike. The first parameters with a recall@10 of at least GOOD_RECALL become the default, or else the last.

    Args:
        folder: the folder of the index.
        queries: vectors to search for.
        total_rows: passages of the corpus.
        exact: function of k that searches exactly.
        trials: search parameters -> function of k that searches with them.

    Returns:
        The entry "recall" of the manifest.
    """
    depths = [depth for depth in DEPTHS if depth < total_rows] or [1]
    own_rows = int(queries.rows is not None)  # one result of each query is left out
    result = exact(max(depths) + own_rows)
    best = _without_own_row(result.scores, result.rows, queries.rows)
    measurements = list[dict[str, Any]]()
    for text, trial in trials.items():
        recall = dict[str, float]()
        for depth in depths:  # a search for each depth: an index may search more lists for a larger k
            start = time.perf_counter()
            result = trial(depth + own_rows)
            milliseconds = 1000 * (time.perf_counter() - start) / len(queries.vectors)
            scores = _without_own_row(result.scores, result.rows, queries.rows)
            recall[str(depth)] = round(recall_at(scores, best, depth), 4)
        measurements.append({"parameters": text, "recall": recall, "ms": round(milliseconds, 3)})
    criterion = "10" if 10 in depths else "1"
    choice = next((row for row in measurements if row["recall"][criterion] >= GOOD_RECALL), measurements[-1])
    recalls = {
        "questions": {"count": len(queries.vectors), "source": queries.source, "sha256": queries.digest()},
        "measured": measurements,
        "parameters": choice["parameters"],
    }
    write_json(folder / "manifest.json", with_digest(read_index_manifest(folder) | {"recall": recalls}))
    return recalls


def _without_own_row(scores: np.ndarray, rows: np.ndarray, query_rows: np.ndarray | None) -> np.ndarray:
    """Return the scores [Q,k-1] without the score of each query's own row, or without the last if it was not found."""
    if query_rows is None:
        return scores
    columns = np.argsort(rows == query_rows[:, None], axis=1, kind="stable")[:, :-1]
    return np.take_along_axis(scores, columns, axis=1)
