"""Recall of an approximate search: the share of exact search's best passages that it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.search.approximate.index_files import read_index_manifest
from jaxret.search.proof import SearchResult, recall_at
from jaxret.storage.atomic import sha256_bytes, with_digest, write_json
from jaxret.types import SparseRows

DEPTHS = (1, 10, 100)  # k at which recall is measured
GOOD = 0.95  # recall@10 from which parameters are good enough to be the default


@dataclass(frozen=True)
class RecallQueries:
    """Vectors to measure recall with."""

    vectors: Any  # [Q,D] float32, or SparseRows
    source: str
    # Where passages stand for queries, the row that each is of: it is left out of the results of both searches.
    rows: np.ndarray | None = None

    def digest(self) -> str:
        """Return the SHA-256 of the vectors."""
        vectors = self.vectors
        arrays = (vectors.words, vectors.weights, vectors.offsets) if isinstance(vectors, SparseRows) else (vectors,)
        return sha256_bytes(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def record_recall(
    folder: Path,
    queries: RecallQueries,
    total_rows: int,
    exact: Callable[[int], SearchResult],
    trials: Mapping[str, Callable[[int], SearchResult]],
) -> dict[str, Any]:
    """Measure recall of exact search at DEPTHS, and milliseconds a query of the deepest; return them, and write them
    into the manifest of an index.

    Recall@k is the share of exact search's k best that a search for k finds; of equal scores it does not matter which.
    The first parameters with recall@10 of GOOD or more become the default, else the last.

    Args:
        queries: vectors to search for.
        total_rows: passages of the corpus.
        exact: function of k that searches exactly.
        trials: search parameters -> function of k that searches with them.
    """
    depths = [depth for depth in DEPTHS if depth < total_rows] or [1]
    more = int(queries.rows is not None)
    result = exact(max(depths) + more)
    best = _without_own_row(result.scores, result.rows, queries.rows)
    measurements = list[dict[str, Any]]()
    for text, trial in trials.items():
        recall = dict[str, float]()
        for depth in depths:  # each of a search for so many: for more, an index may look harder
            start = time.perf_counter()
            result = trial(depth + more)
            milliseconds = 1000 * (time.perf_counter() - start) / len(queries.vectors)
            scores = _without_own_row(result.scores, result.rows, queries.rows)
            recall[str(depth)] = round(recall_at(scores, best, depth), 4)
        measurements.append({"parameters": text, "recall": recall, "ms": round(milliseconds, 3)})
    criterion = "10" if 10 in depths else "1"
    good = next((row for row in measurements if row["recall"][criterion] >= GOOD), measurements[-1])
    recalls = {
        "questions": {"count": len(queries.vectors), "source": queries.source, "sha256": queries.digest()},
        "measured": measurements,
        "parameters": good["parameters"],
    }
    write_json(folder / "manifest.json", with_digest(read_index_manifest(folder) | {"recall": recalls}))
    return recalls


def _without_own_row(scores: np.ndarray, rows: np.ndarray, own: np.ndarray | None) -> np.ndarray:
    """Return the scores [Q,k] without those of each query's own row; of a query that has not found it, without the
    last."""
    if own is None:
        return scores
    last = np.argsort(rows == own[:, None], axis=1, kind="stable")[:, :-1]
    return np.take_along_axis(scores, last, axis=1)
