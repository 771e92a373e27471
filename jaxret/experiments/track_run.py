"""Send a run's metrics and evaluations to experiment trackers (`jaxret track`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from jaxret.runs.run import open_run
from jaxret.runs.trackers import RunTracker, check_trackers


class SentCounts(NamedTuple):
    """Counts of the lines and evaluations that were sent to a tracker."""

    lines: int  # lines of metrics.jsonl
    evaluations: int


def track_run(path: str | os.PathLike[str], names: Sequence[str], project: str = "") -> dict[str, SentCounts]:
    """Send metrics and evaluations of a run that trackers do not have yet, and return tracker -> counts.

    Args:
        path: the run's folder.
        names: names of the trackers.
        project: name of the project at the trackers; "" for the project in the run's config.

    Raises:
        ValueError: no tracker is given, or one is unknown, is not installed or fails.
        FileNotFoundError: the folder is not a run.
    """
    if not names:
        raise ValueError("--to is empty; give trackio, wandb or mlflow, or several with commas")
    check_trackers(names, "--to")
    run = open_run(path)
    workdir, project = run.workdir, project or run.config.train.tracker_project
    counts = {}
    for name in names:
        try:
            tracker = RunTracker(name, workdir, project)
            counts[name] = SentCounts(tracker.catch_up(), tracker.send_evaluations())
            tracker.finish()
        except Exception as error:  # trackers raise errors of any class
            package = isinstance(error, ModuleNotFoundError) and error.name
            remedy = f"; pip install {package}" if package else ""
            raise ValueError(f"{name} failed: {type(error).__name__}: {error}{remedy}") from error
    return counts
