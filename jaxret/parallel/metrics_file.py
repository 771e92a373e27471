"""Progress and metrics of a job in a file for the textfile collector of Prometheus' node exporter.

It is the flag --prometheus of every verb.

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

INTERVAL = 10.0  # seconds between updates by progress

_files: list[MetricsFile] = []  # none, or the one of this process


class MetricsFile:
    """Gauges of one job. The file is replaced as a whole at each update, by process 0 of the job alone. A file that
    cannot be written does not end the job; a message is printed once, on standard error.

    Raises ValueError for a name that the collector does not read, a folder that is not there, or a missing package.
    """

    def __init__(self, path: str, verb: str) -> None:
        """Prepare the file `path`. verb: of the job, a label of every metric."""
        if importlib.util.find_spec("prometheus_client") is None:
            raise ValueError(f"--prometheus={path} needs a package: pip install 'prometheus-client>=0.26'")
        if re.match(r"\w+://", path):
            raise ValueError(f"--prometheus={path}: give a file on this host's disk, where the node exporter reads it")
        if not path.endswith(".prom"):
            raise ValueError(f"--prometheus={path}: its name must end with .prom, as the node exporter reads no others")
        if not Path(path).parent.is_dir():
            raise ValueError(f"--prometheus={path}: there is no folder {Path(path).parent}; it is made by no command")
        from prometheus_client import CollectorRegistry, Gauge

        self._path, self._verb, self._registry = path, verb, CollectorRegistry()
        labels = {"done": ("work", "unit"), "total": ("work", "unit"), "metric": ("run", "name"), "step": ("run",)}
        texts = {
            "done": "finished parts of the work that is going on",
            "total": "parts of the work that is going on",
            "metric": "newest value of a metric of training or validation",
            "step": "step of the newest metrics",
            "status": "exit status of the job; -1: it runs",
        }
        self._gauges: dict[str, Any] = {
            name: Gauge(f"jaxret_job_{name}", text, ["verb", *labels.get(name, ())], registry=self._registry)
            for name, text in texts.items()
        }
        self._next, self._failed = 0.0, False
        self.set("status", -1)
        self.write()

    def set(self, gauge: str, value: int | float, /, **labels: str) -> None:
        """Set a gauge; the file has it from the next `write` on."""
        self._gauges[gauge].labels(verb=self._verb, **labels).set(value)

    def write(self, every: float = 0.0) -> None:
        """Replace the file, unless it was replaced in the last `every` seconds."""
        now = time.monotonic()
        if (every and now < self._next) or not is_first_process():
            return
        from prometheus_client import write_to_textfile

        self._next = now + every
        try:
            write_to_textfile(self._path, self._registry)
        except OSError as error:  # the job is worth more than its file
            if not self._failed:
                print(f"--prometheus={self._path} is not written ({error}); the job continues", file=sys.stderr)
            self._failed = True


def start_metrics_file(path: str, verb: str) -> None:
    """Keep a file of this process's metrics. Raises ValueError as MetricsFile does.

    path: of the file. verb: of the job.
    """
    _files[:] = [MetricsFile(path, verb)]


def report_progress(work: str, unit: str, finished_parts: int, total: int | None) -> None:
    """Set the progress of some work, every INTERVAL seconds at most; do nothing without a file.

    Args:
        work: name of it, in one or two words.
        unit: a part of it, in one word.
        finished_parts: count so far.
        total: parts; None: not known.
    """
    for file in _files:
        file.set("done", finished_parts, work=work, unit=unit)
        if total:
            file.set("total", total, work=work, unit=unit)
        file.write(every=INTERVAL)


def report_metrics(run: str | os.PathLike[str], step: int, metrics: dict[str, float]) -> None:
    """Set the newest metrics of a run; do nothing without a file.

    Args:
        run: its folder.
        step: of the metrics.
        metrics: name -> value.
    """
    for file in _files:
        file.set("step", step, run=os.fspath(run))
        for name, value in metrics.items():
            file.set("metric", value, run=os.fspath(run), name=name)
        file.write()


def report_status(status: int) -> None:
    """Set the exit status of the job; do nothing without a file."""
    for file in _files:
        file.set("status", status)
        file.write()
