"""How long one question takes in a warm process: encoding it, and searching for it, apart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxret.data.records import Query
from jaxret.retrieval.retrieve import Searcher

PERCENTILES = (1, 50, 90, 99)
LATENCY = 100  # questions that are asked, unless somebody says otherwise
SECONDS = 20.0  # after which no further question is asked


def measure(
    searcher: Searcher,
    queries: Sequence[Query],
    k: int,
    most: int,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Asks up to `most` of the queries, evenly spread, one at a time, after a warm-up with their lengths.

    Encoding is text to tokens to vectors on the host; search is vectors to ids and exact scores. Returns JSON:
    milliseconds as "p1", "p50", "p90", "p99", each a time that was seen (the nearest rank), and what they were measured
    on. Where the vectors do not fit in memory ("vectors": "disk"), every search reads all of them.
    """
    asked = spread(queries, most)
    searcher.warm_up([query.text for query in asked], k)
    times: list[tuple[float, float]] = []  # ms
    begun = clock()
    for query in asked:
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
        **conditions(len(times), k, searcher.run.mesh),
        "vectors": searcher.where,
        "backend": searcher.description,
    }


def spread(queries: Sequence[Query], most: int) -> list[Query]:
    """Up to `most` of the queries, evenly spread."""
    places = np.unique(np.linspace(0, len(queries) - 1, min(most, len(queries))).astype(int))
    return [queries[place] for place in places]


def conditions(questions: int, k: int, mesh: Mesh) -> dict[str, Any]:
    """On what times were measured."""
    return {
        "questions": questions,
        "batch": 1,
        "k": k,
        "percentiles": "nearest rank",
        "device": str(mesh.devices.flat[0].device_kind),
        "processors": os.cpu_count(),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"p50": the smallest of the values that half of them do not exceed, ...} to three decimals."""
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, found)}


def told(latency: dict[str, Any]) -> str:
    """A line of it."""
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
