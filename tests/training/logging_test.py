"""The log of a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxret.runs.workdir import Workdir
from jaxret.training.logging import MetricsLog


@pytest.mark.parametrize(
    "damaged", [b'{"step": 2, "lo', b'{"step": 2, "l\xffss": 1.0}', b'{"stap": 2}', b'{"step": "2"}', b"7"]
)
def test_a_damaged_line_does_not_affect_others(damaged: bytes, tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0 / step}).encode() for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], damaged, *lines[2:]]) + b"\n")
    MetricsLog(Workdir(tmp_path), 4).close()
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == [lines[0], *lines[2:4]]
