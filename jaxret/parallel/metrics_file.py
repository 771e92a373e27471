"""The flag --prometheus of every verb: metrics of a job in a file for the textfile collector of Prometheus.

docs/events.md lists the metrics.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from jaxret.parallel.first_process import is_first_process

UPDATE_INTERVAL = 10.0  # seconds between updates of the file by `report_progress`

_files: list[MetricsFile] = []  # the file of this process, if it has one


class MetricsFile:
    """The gauges of one job. Only process 0 writes the file, and each update replaces it. If it cannot be written, a
    message is printed once on standard error, and the job continues.

    Raises ValueError for a name that the collector does not read, a missing folder, or a missing package.
    """

    def __init__(self, path: str, verb: str) -> None:
        """Write the first version of the file `path`. `verb` is the verb of the job, a label of every metric."""
        if importlib.util.find_spec("prometheus_client") is None:
            raise ValueError(f"--prometheus={path} needs a package: pip install 'jaxret[serve]'")
        if re.match(r"\w+://", path):
            raise ValueError(f"--prometheus={path}: give a file on a disk of this host, for the node exporter")
        if not path.endswith(".prom"):
            raise ValueError(
                f"--prometheus={path}: the name must end with .prom, or the node exporter ignores the file"
            )
        if not Path(path).parent.is_dir():
            raise ValueError(f"--prometheus={path}: there is no folder {Path(path).parent}; make it first")
        from prometheus_client import CollectorRegistry, Gauge

        self._path, self._verb, self._registry = path, verb, CollectorRegistry()
        labels = {"done": ("work", "unit"), "total": ("work", "unit"), "metric": ("run", "name"), "step": ("run",)}
        texts = {
            "done": "finished parts of the current work",
            "total": "parts of the current work",
            "metric": "latest value of a metric of training or validation",
            "step": "step of the latest metrics",
            "status": "exit status of the job; -1: the job is running",
        }
        self._gauges: dict[str, Any] = {
            name: Gauge(f"jaxret_job_{name}", text, ["verb", *labels.get(name, ())], registry=self._registry)
            for name, text in texts.items()
        }
        self._next, self._has_failed = 0.0, False
        self.set("status", -1)
        self.write()

    def set(self, gauge: str, value: int | float, /, **labels: str) -> None:
        """Set a gauge. The next `write` puts it into the file."""
        self._gauges[gauge].labels(verb=self._verb, **labels).set(value)

    def write(self, interval: float = 0.0) -> None:
        """Replace the file, unless it was replaced in the last `interval` seconds."""
        clock = time.monotonic()
        if (interval and clock < self._next) or not is_first_process():
            return
        from prometheus_client import write_to_textfile

        self._next = clock + interval
        try:
            write_to_textfile(self._path, self._registry)
        except OSError as error:  # the job is more important than this file
            if not self._has_failed:
                print(f"--prometheus={self._path} is not written ({error}); the job continues", file=sys.stderr)
            self._has_failed = True


def start_metrics_file(path: str, verb: str) -> None:
    """Write metrics of this process to the file `path` from now on; `verb` is the job's verb. Raises ValueError for
    an invalid path or a missing package."""
    _files[:] = [MetricsFile(path, verb)]


def report_progress(work: str, unit: str, finished_parts: int, total: int | None) -> None:
    """Set the progress of some work, and write the file at most every UPDATE_INTERVAL seconds. Does nothing without a
    file.

    Args:
        work: name of the work, in one or two words.
        unit: name of a part of the work, in one word.
        finished_parts: number of finished parts.
        total: number of parts; None: unknown.
    """
    for file in _files:
        file.set("done", finished_parts, work=work, unit=unit)
        if total:
            file.set("total", total, work=work, unit=unit)
        file.write(UPDATE_INTERVAL)


def report_metrics(run: str | os.PathLike[str], step: int, metrics: dict[str, float]) -> None:
    """Set the latest metrics of a run, and write the file. Does nothing without a file.

    Args:
        run: folder of the run.
        step: step of the metrics.
        metrics: name -> value.
    """
    for file in _files:
        file.set("step", step, run=os.fspath(run))
        for name, value in metrics.items():
            file.set("metric", value, run=os.fspath(run), name=name)
        file.write()


def report_status(status: int) -> None:
    """Set the exit status of the job, and write the file. Does nothing without a file."""
    for file in _files:
        file.set("status", status)
        file.write()
