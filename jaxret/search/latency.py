"""The latency of one question in a warm process: encoding it, and searching for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxret.data.records import Query
from jaxret.search.searcher import Searcher

PERCENTILES = (1, 50, 90, 99)
LATENCY = 100  # questions by default, for at most
SECONDS = 20.0


def measure_latency(
    searcher: Searcher,
    queries: Sequence[Query],
    k: int,
    latency: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Encode and search some of the queries, evenly spread, one at a time, after a warm-up with their lengths.

    Encoding is text to tokens to vectors on the host; search is vectors to ids and exact scores. Where the vectors do
    not fit in memory ("vectors": "disk"), every search reads all of them.

    Args:
        queries: to choose from.
        k: passages to search for.
        latency: number of queries, however long they take; None for LATENCY, for at most SECONDS.

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
        "vectors": searcher.vector_location,
        "backend": searcher.description,
    }


def measure_by_passages(
    searcher: Searcher, queries: Sequence[Query], k: int, latency: int | None, counts: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Return the time of a search by the number of passages that are scored, as table 3 of I3: JSON, the number ->
    percentiles of milliseconds.

    Args:
        queries: to choose from.
        k: passages to search for; all of them where they are fewer.
        latency: as for `measure_latency`.
        counts: numbers of passages, the first ones of the corpus.

    Raises:
        ValueError: the search is approximate, or there are fewer passages.
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
    """Run every query through phases, one query at a time.

    Args:
        sample: the queries.
        latency: None: no further query begins after SECONDS; a number: all of the sample.
        phases: name -> function of the query, or of the value of the phase before it.

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
    """Return whether no further query is timed: only the default number of queries has a limit of time."""
    return latency is None and seconds > SECONDS


def spread_evenly(queries: Sequence[Query], latency: int | None) -> list[Query]:
    """Return a number of the queries, LATENCY for None, evenly spread; all where they are fewer."""
    most = LATENCY if latency is None else latency
    places = np.unique(np.linspace(0, len(queries) - 1, min(most, len(queries))).astype(int))
    return [queries[place] for place in places]


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
    """Return {"p50": the smallest of the values that half of them do not exceed, ...}, to three decimals."""
    quantiles = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{percentile}": round(float(value), 3) for percentile, value in zip(PERCENTILES, quantiles)}


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
    where = f", vectors {places[latency['vectors']]}" if "vectors" in latency else ""
    return f"one question at a time ({latency['questions']:,} asked{where}): {'; '.join(halves)}" + "".join(
        f"\nsearch of the first {int(count):,} passages: p50 {times['p50']:.2f} ms, p99 {times['p99']:.2f} ms"
        for count, times in latency.get("search_ms_by_passages", {}).items()
    )
