"""The logs of a run: metrics.jsonl (a line for each logged step), TensorBoard, and env.json."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
from tensorboardX import SummaryWriter

from jaxret.parallel.events import emit
from jaxret.parallel.metrics_file import report_metrics
from jaxret.runs.seal import write_sealed
from jaxret.runs.trackers import LiveTrackers
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import atomic_write, storage_errors
from jaxret.storage.buckets.working_copy import shown_path
from jaxret.version import __version__

MetricsCallback = Callable[[int, dict[str, float]], object]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "tokenizers", "safetensors")


def environment_record() -> dict[str, Any]:
    """Return versions and devices. Another machine must have the same ones to repeat a run."""
    return {
        "jaxret": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "command": sys.argv,
        "git": git_state(),
    }


def git_state() -> dict[str, Any] | None:
    """Return the commit of the current folder, and whether tracked files differ from it; None outside of git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or a disk does not answer
        return None
    if commit.returncode or status.returncode:
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}


class MetricsLog:
    """Appends to a run's metrics.jsonl and tensorboard/. Only process 0 writes.

    A run that resumes first drops the lines after `resume_step`, so that every step is logged once.

    Args:
        workdir: the folder of the run.
        resume_step: step of the checkpoint that the run continues from.
        callback: called with the step and the values of each line that was written.
        trackers: names of experiment trackers that also get the lines.
        project: name of the project at the trackers.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int,
        callback: MetricsCallback | None = None,
        trackers: Sequence[str] = (),
        project: str = "",
    ) -> None:
        self._workdir, self._path, self._callback = workdir, workdir.metrics, callback
        self._active = jax.process_index() == 0
        if not self._active:
            return
        lines = []
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        lines.append(line + b"\n")
                except (ValueError, KeyError, TypeError):
                    continue  # the machine stopped during the write, or the line is damaged; the other lines are kept
        with atomic_write(self._path, "wb") as file:
            file.writelines(lines)
        write_sealed(workdir, {workdir.environment: environment_record()})
        self._folder = workdir.tensorboard
        with storage_errors(self._folder):
            self._board = SummaryWriter(str(self._folder), purge_step=resume_step + 1)
        self._trackers = LiveTrackers(trackers, workdir, project)

    def write(self, step: int, values: dict[str, float], prefix: str = "") -> None:
        """Write a JSON line {"step": ..., name: value, ...}, and a TensorBoard scalar for each value.

        Values that are not finite, such as the loss of a skipped step, are not written, because JSON has no number for
        them. `prefix` is put in front of the names.
        """
        if not self._active:
            return
        values_by_name = {f"{prefix}{name}": float(value) for name, value in values.items() if math.isfinite(value)}
        with storage_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values_by_name}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a resumed run cannot write the lines before its checkpoint again
        with storage_errors(self._folder):
            for name, value in values_by_name.items():
                self._board.add_scalar(name, value, step)
        self._trackers.send(step, values_by_name)
        report_metrics(shown_path(self._workdir.path), step, values_by_name)
        if prefix:
            emit("validation", workdir=self._workdir.path, step=step, metrics=values)
        else:
            emit("metrics", workdir=self._workdir.path, step=step, metrics=values)
        if self._callback:
            self._callback(step, values_by_name)

    def close(self) -> None:
        """End the log: close TensorBoard's file, and end the run at the trackers."""
        if self._active:
            with storage_errors(self._folder):
                self._board.close()
            self._trackers.finish()
