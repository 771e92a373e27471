"""Warnings of the jobs of a run, stored in its folder for `jaxret report`. Each job has a file, which the next job with
the same name replaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, write_json


class RunWarning(NamedTuple):
    """A warning of a job."""

    kind: str  # truncation, collapse, leak, duplicates, settings or devices
    text: str  # a sentence


def keep_warnings(workdir: Workdir, job: str, warnings: Iterable[RunWarning]) -> None:
    """Write the warnings of a job ("train", "encode scifact", "search scifact.test"). A job without warnings also
    writes a file, which shows that it checked."""
    write_json(workdir.warnings(job), {"job": job, "warnings": [warning._asdict() for warning in warnings]})


def read_warnings(workdir: Workdir) -> dict[str, list[RunWarning]]:
    """Return job -> its warnings, sorted by job. Raises ValueError for a file without warnings of a job."""
    jobs: dict[str, list[RunWarning]] = {}
    for path in sorted(workdir.path.glob("warnings/*.json")):
        content = read_json(path)
        try:
            jobs[str(content["job"])] = [
                RunWarning(str(entry["kind"]), str(entry["text"])) for entry in content["warnings"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no warnings of a job ({error!r}); remove it") from error
    return jobs
