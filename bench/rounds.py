"""Rounds in which systems take turns, checks between rounds whether the machine is idle, and results as JSON.

The scripts that compare jaxret with a peer write their seconds with `--json=FILE`; bench/all.py runs these scripts.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

WORK = bytes(1 << 20)
REPEATS = 64  # about 0.04 s on a core with instructions for SHA-256
REST = 0.15  # seconds until threads of OpenBLAS (after a tenth), torch, FAISS and XLA stop spinning

T = TypeVar("T")
Seconds = Mapping[str, list[float]]  # the time of each round, by system


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_import(*modules: str) -> bool:
    """Return whether the modules of a peer are installed; print how to install them if not."""
    missing = [module for module in modules if not importlib.util.find_spec(module)]
    if missing:
        print(f"left out: {', '.join(missing)} cannot be imported (pip install -r requirements-bench.txt)", flush=True)
    return not missing


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `run` and its seconds, after a rest in which threads of the previous system stop
    spinning."""
    time.sleep(REST)
    begin = time.perf_counter()
    result = run()
    return result, time.perf_counter() - begin


def calibrate() -> tuple[float, float]:
    """Return the seconds of a fixed piece of work on every core, and the share of the cores that it got: 1 on an idle
    machine."""

    def work(_: int) -> float:
        begin = time.thread_time()
        for _ in range(REPEATS):
            hashlib.sha256(WORK)  # it does not hold the lock of the interpreter
        return time.thread_time() - begin

    time.sleep(REST)
    with ThreadPoolExecutor(cores()) as threads:
        begin = time.perf_counter()
        busy = sum(threads.map(work, range(cores())))
        seconds = time.perf_counter() - begin
    return seconds, busy / (cores() * seconds)


class Results:
    """Seconds of systems and their peers, by case, and a calibration for each round.

    Args:
        path: file to write; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cases: list[dict[str, Any]] = []
        self.calibrations: list[tuple[float, float]] = []

    def calibrate(self) -> None:
        """Record whether the machine is idle now; call it before each round."""
        if self.path:
            self.calibrations.append(calibrate())

    def rounds(self, systems: Mapping[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
        """Return the seconds of every system; the systems take turns."""
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(count):
            self.calibrate()
            for name, run in systems.items():
                seconds[name].append(timed(run)[1])
        return seconds

    def add(self, case: str, ours: Seconds, peers: Seconds) -> None:
        """Record the seconds of a case. Its name has all sizes, because `--compare` pairs cases by name."""
        self.cases.append({"case": case, "ours": dict(ours), "peers": dict(peers)})

    def write(self) -> None:
        """Write the file."""
        if self.path:
            self.path.write_text(json.dumps({"cases": self.cases, "calibrations": self.calibrations}) + "\n")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json=FILE`."""
    parser.add_argument("--json", type=Path, help="file for the seconds of every round")
