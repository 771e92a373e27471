"""The latency of single queries in a process that has compiled its programs: encoding, and search."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxret.data.records import Query
from jaxret.search.searcher import Searcher

PERCENTILES = (1, 50, 90, 99)
DEFAULT_COUNT = 100  # queries that are timed by default
MOST_SECONDS = 20.0  # time after which, by default, no further query begins


def measure_latency(
    searcher: Searcher,
    queries: Sequence[Query],
    k: int,
    latency: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure the times of encoding and of searching single queries, after a warm-up with their lengths.

    Encoding turns text into tokens and into vectors on the host. Search turns vectors into ids and exact scores. If the
    vectors do not fit in memory ("vectors": "disk"), every search reads all of them.

    Args:
        searcher: the searcher.
        queries: all queries; an evenly spread sample is used.
        k: passages to search for.
        latency: size of the sample; None: DEFAULT_COUNT queries, for at most MOST_SECONDS.
        clock: function that returns the time in seconds.

    Returns:
        JSON: milliseconds as "p1", "p50", "p90", "p99", each a measured time (the nearest rank), and the conditions.
    """
    sample = spread_evenly(queries, latency)
    searcher.warm_up(sample, k)
    phases = {"encode_ms": lambda query: searcher.encode([query])[1], "search_ms": lambda vec: searcher.nearest(vec, k)}
    times = time_phases(sample, latency, phases, clock)
    return {
        **times,
        **measurement_conditions(k, str(searcher.run.mesh.devices.flat[0].device_kind)),
        "vectors": searcher.vectors.location,
        "backend": searcher.vectors.description,
    }


def measure_by_passages(
    searcher: Searcher, queries: Sequence[Query], k: int, latency: int | None, counts: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Return the times of searches of the first passages of a corpus, as in table 3 of I3.

    Args:
        searcher: the searcher.
        queries: all queries; an evenly spread sample is used.
        k: passages to search for, at most as many as are searched.
        latency: size of the sample, as in `measure_latency`.
        counts: numbers of passages to search.

    Returns:
        JSON: number of passages -> percentiles of milliseconds.

    Raises:
        ValueError: the search is approximate, or the corpus has fewer passages.
    """
    times = {}
    for count in counts:
        part = searcher.first(count)
        times[str(count)] = measure_latency(part, queries, min(k, count), latency)["search_ms"]
    return times


def time_phases(
    sample: Sequence[Query],
    latency: int | None,
    phases: Mapping[str, Callable[[Any], Any]],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure the times of the phases of each query, one query at a time.

    Args:
        sample: the queries.
        latency: None: no further query begins after MOST_SECONDS; a number: all queries are timed.
        phases: name -> function of the query (the first phase) or of the value of the previous phase.
        clock: function that returns the time in seconds.

    Returns:
        JSON: name of a phase -> percentiles of its milliseconds; "questions": the number of queries.
    """
    times: dict[str, list[float]] = {name: [] for name in phases}
    first_start = clock()
    for query in sample:
        value: Any = query
        start = clock()
        for name, phase in phases.items():
            value = phase(value)
            end = clock()
            times[name].append(1000 * (end - start))
            start = end
        if is_over(latency, start - first_start):
            break
    return {**{name: percentiles(values) for name, values in times.items()}, "questions": max(map(len, times.values()))}


def is_over(latency: int | None, seconds: float) -> bool:
    """Return whether the time limit is reached. Only the default number of queries has a time limit."""
    return latency is None and seconds > MOST_SECONDS


def spread_evenly(queries: Sequence[Query], latency: int | None) -> list[Query]:
    """Return `latency` queries (None: DEFAULT_COUNT), evenly spread, or all if there are fewer."""
    count = DEFAULT_COUNT if latency is None else latency
    rows = np.unique(np.linspace(0, len(queries) - 1, min(count, len(queries))).astype(int))
    return [queries[row] for row in rows]


def measurement_conditions(k: int, device: str) -> dict[str, Any]:
    """Return the conditions of a measurement with k passages on a device, as JSON."""
    return {
        "batch": 1,
        "k": k,
        "percentiles": "nearest rank",
        "device": device,
        "processors": os.cpu_count(),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles {"p50": ..., ...}, each a measured value (the nearest rank), with three decimals."""
    quantiles = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{percentile}": round(float(value), 3) for percentile, value in zip(PERCENTILES, quantiles)}


def describe_latency(latency: Mapping[str, Any]) -> str:
    """Return a line about a measured latency."""
    phases = (
        f"{name} p50 {latency[key]['p50']:.2f} ms, p99 {latency[key]['p99']:.2f} ms"
        for name, key in (("encoding", "encode_ms"), ("search", "search_ms"), ("reranking", "rerank_ms"))
        if key in latency
    )
    locations = {
        "memory": "in memory",
        "devices": "on the devices",
        "disk": "read from disk each time",
        "mapped": "mapped from disk",
    }
    details = f", vectors {locations[latency['vectors']]}" if "vectors" in latency else ""
    details += f", {latency['k']} passages each" if "rerank_ms" in latency else ""
    return f"one question at a time ({latency['questions']:,} asked{details}): {'; '.join(phases)}" + "".join(
        f"\nsearch of the first {int(count):,} passages: p50 {times['p50']:.2f} ms, p99 {times['p99']:.2f} ms"
        for count, times in latency.get("search_ms_by_passages", {}).items()
    )
