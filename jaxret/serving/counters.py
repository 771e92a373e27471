"""Counts of a server for Prometheus, and its log with a JSON object on each line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxret.serving.device import DeviceThread

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Counters:
    """The counts of one server."""

    def __init__(self, device: DeviceThread) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "jaxret_requests", "answers by route and status", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "jaxret_request_seconds", "time of an answer", ["route"], buckets=_SECONDS, registry=registry
        )
        self.batches = Histogram("jaxret_batch_texts", "texts computed at a time", buckets=_SIZES, registry=registry)
        self.programs = Gauge("jaxret_programs", "compiled programs at the start", registry=registry)
        self.ready = Gauge("jaxret_ready", "1 when all programs are compiled", registry=registry)
        gauge = Gauge("jaxret_waiting_texts", "texts that wait to be computed", registry=registry)
        gauge.set_function(lambda: device.waiting)
        device.report = self.batches.observe

    def page(self) -> bytes:
        """Return the counts as text."""
        return generate_latest(self._registry)


def log_event(event: str, **values: Any) -> None:
    """Write a line of the log to stderr."""
    seconds = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
    sys.stderr.write(json.dumps({"time": stamp, "event": event, **values}) + "\n")
    sys.stderr.flush()


class LogHandler(logging.Handler):
    """Writes the messages of a library as lines of the log."""

    def emit(self, record: logging.LogRecord) -> None:
        log_event("library", name=record.name, level=record.levelname, message=record.getMessage()[:500])
