"""The latency of one question in a warm process: encoding it, and searching for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxret.data.records import Query
from jaxret.search.searcher import Searcher

PERCENTILES = (1, 50, 90, 99)
LATENCY = 100  # questions that are asked, unless somebody says otherwise
SECONDS = 20.0  # after which no further question is asked


def measure_latency(
    searcher: Searcher,
    queries: Sequence[Query],
    k: int,
    limit: int,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Encode and search up to `limit` of the queries, evenly spread, one at a time, after a warm-up with their lengths.

    Encoding is text to tokens to vectors on the host; search is vectors to ids and exact scores. Where the vectors do
    not fit in memory ("vectors": "disk"), every search reads all of them.

    Args:
        searcher: the corpus.
        queries: to choose from.
        k: passages to search for.
        limit: queries at most.
        seconds: time after which no further query is encoded.
        clock: returns seconds.

    Returns:
        JSON: milliseconds as "p1", "p50", "p90", "p99", each a measured time (the nearest rank), and the conditions.
    """
    sample = spread_evenly(queries, limit)
    searcher.warm_up([query.text for query in sample], k)
    times: list[tuple[float, float]] = []  # ms
    begun = clock()
    for query in sample:
        start = clock()
        _, vectors = searcher.encode([query])
        encoded = clock()
        searcher.nearest(vectors, k)
        end = clock()
        times.append((1000 * (encoded - start), 1000 * (end - encoded)))
        if end - begun > seconds:
            break
    return {
        **{name: percentiles(values) for name, values in zip(("encode_ms", "search_ms"), zip(*times))},
        **measurement_conditions(len(times), k, searcher.run.mesh),
        "vectors": searcher.vector_location,
        "backend": searcher.description,
    }


def spread_evenly(queries: Sequence[Query], most: int) -> list[Query]:
    """Return up to `most` of the queries, evenly spread."""
    places = np.unique(np.linspace(0, len(queries) - 1, min(most, len(queries))).astype(int))
    return [queries[place] for place in places]


def measurement_conditions(questions: int, k: int, mesh: Mesh) -> dict[str, Any]:
    """Return the conditions of a measurement, as JSON."""
    return {
        "questions": questions,
        "batch": 1,
        "k": k,
        "percentiles": "nearest rank",
        "device": str(mesh.devices.flat[0].device_kind),
        "processors": os.cpu_count(),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return {"p50": the smallest of the values that half of them do not exceed, ...}, to three decimals."""
    quantiles = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, quantiles)}


def describe_latency(latency: dict[str, Any]) -> str:
    """Return a line on a measured latency."""
    halves = (
        f"{name} p50 {latency[key]['p50']:.2f} ms, p99 {latency[key]['p99']:.2f} ms"
        for name, key in (("encoding", "encode_ms"), ("search", "search_ms"))
    )
    places = {
        "memory": "in memory",
        "devices": "on the devices",
        "disk": "read from disk each time",
        "mapped": "mapped from disk",
    }
    where = places[latency["vectors"]]
    return f"one question at a time ({latency['questions']} asked, vectors {where}): {'; '.join(halves)}"
