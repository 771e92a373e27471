"""Runs and a server for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.servers import Running, running, write_runs

LIMITS = ("--most_hits=100000", "--most_numbers=500000")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs."""
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of all runs."""
    stderr = tmp_path_factory.mktemp("server") / "stderr"
    names = ("mlr", "dual", "late", "cross")
    with running(stderr, *(str(runs / name) for name in names), "--batch=16", "--body_seconds=3", *LIMITS) as server:
        yield server
