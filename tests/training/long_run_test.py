"""A training that goes on for long holds no more at its end than at its beginning."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from jaxret.training.loop import train
from tests.pipeline import resources, tiny_config, write_data, write_encoder


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("steps", [pytest.param(5000, marks=pytest.mark.exhaustive), 100])
@pytest.mark.parametrize("keeps", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_steps_leave_nothing_behind(steps: int, keeps: bool, tmp_path: Path) -> None:
    """Open files, threads and memory after the first fifth of the steps and at the end. Control: a callback that keeps
    files and memory is seen."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    seen: list[tuple[int, int, int]] = []
    kept: list[Any] = []

    def look(step: int, metrics: dict[str, Any]) -> None:
        seen.append(resources())
        if keeps:
            kept.extend([socket.socket(), bytearray(b"x" * 10 * 2**20)])

    saves = {"train__log_every": steps // 10, "train__checkpoint_every": steps, "data__dev": ""}
    config = tiny_config(tmp_path / "encoder", tmp_path / "data", train__steps=steps, **saves)
    train(config, tmp_path / "run", progress=False, callback=look)
    early, late = seen[2], seen[-1]
    assert len(seen) == 10
    assert (late[0] > early[0] + 2) == keeps
    assert late[1] <= early[1] + 2
    assert (late[2] - early[2] > 32 * 2**20) == keeps
    for number, one in enumerate(kept):
        if number % 2 == 0:
            one.close()
