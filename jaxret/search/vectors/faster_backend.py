"""Choose the faster of two backends for a large search, by a measurement on a sample of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxret.search.backends.faiss_backend import FaissCpu
from jaxret.search.backends.select import Backend
from jaxret.search.vectors.query_vectors import QueryVectors
from jaxret.search.vectors.self_check import self_check
from jaxret.search.vectors.single_vector import BLOCK_ROWS, QUERY_ROWS
from jaxret.search.vectors.streaming import read_rows
from jaxret.search.vectors.vector_corpus import BlockCorpus, VectorCorpus

# A search with fewer operations takes less than two minutes on two cores; the measurement takes five seconds.
LEAST_OPERATIONS = 2e13
ROUNDS = 2  # measurements of each backend, in turn


@dataclass(frozen=True)
class _FirstRows(BlockCorpus):
    """The first rows of a corpus. Errors name its passages."""

    corpus: VectorCorpus

    def describe(self, row: int) -> str:
        return self.corpus.describe(row)


def faster_backend(
    backend: Backend,
    queries: QueryVectors,
    corpus: VectorCorpus,
    candidates_of: Callable[[QueryVectors, BlockCorpus, Backend], object],
) -> Backend:
    """Return the backend of a search: the given one or its rival, whichever is faster on a sample of a large search.

    Only a backend that `auto` chose on a CPU has a rival. Which one is faster depends on the processor, not on the
    numbers of queries and passages alone. The results of both are equal, bit for bit.

    Args:
        backend: the backend that was selected.
        queries: the queries.
        corpus: the passages.
        candidates_of: function of (queries, passages, backend) that searches for candidates.

    Raises RuntimeError if the rival's scores differ from float64 products.
    """
    if not isinstance(backend, FaissCpu) or backend.rival is None or corpus.ragged:
        return backend
    shards = list(corpus)
    if 2 * len(queries) * corpus.total_rows * shards[0][1].shape[1] * corpus.dimension < LEAST_OPERATIONS:
        return backend
    sample = _FirstRows([read_rows(shards, 0, min(corpus.total_rows, BLOCK_ROWS))], corpus)
    sample_queries = queries.take(np.arange(min(len(queries), QUERY_ROWS)))
    rival = backend.rival("auto")
    self_check(rival)
    candidates = (backend, rival)
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for _ in range(1 + ROUNDS):  # the first compiles programs and starts threads
        for candidate in candidates:
            start = time.perf_counter()
            candidates_of(sample_queries, sample, candidate)
            seconds[candidate.name].append(time.perf_counter() - start)
    fastest = {name: min(times[1:]) for name, times in seconds.items()}
    times = ", ".join(f"{name} {duration:.3f} s" for name, duration in fastest.items())
    reason = f"auto: a sample of the search took {times}"
    return backend.open(reason) if fastest[backend.name] <= fastest[rival.name] else backend.rival(reason)
