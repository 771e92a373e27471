"""`make accelerator`: verdicts, parts that hang or fail, and the rehearsal on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import accelerator
from bench.accelerator import NO_PLAN, PARTS, Row, judge_memory, judge_time, run_part, to_markdown, why_no_peer
from tests.pipeline import REPOSITORY

GIB = 2**30


def planned(seconds: float = 0.010, arithmetic: float = 0.008, total: float = 10, at_least: bool = False) -> Any:
    memory = {"total": int(total * GIB), "at_least": at_least}
    return {"lower_bound": {"seconds": seconds, "arithmetic": arithmetic}, "memory": memory}


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        (0.020, "ok"),
        (0.009, "faster than the lower bound, which is therefore wrong"),
        (0.100, "less than 30% of the lower bound"),
    ],
)
def test_a_time_is_compared_with_its_lower_bound(seconds: float, verdict: str) -> None:
    row = judge_time("a step", planned(), seconds, "9 queries/s")
    assert row.verdict == verdict
    assert row.planned == "at least 10.0 ms"
    assert row.measured.endswith(f"9 queries/s, {0.008 / seconds:.0%} of the full rate of products")
    assert judge_time("a step", None, seconds, "9 queries/s").verdict == NO_PLAN, "this device has no plan"


@pytest.mark.parametrize(
    ("total", "at_least", "verdict"), [(10, False, "ok"), (9, False, "more than planned"), (9, True, "ok")]
)
def test_memory_is_compared_with_the_plan(total: float, at_least: bool, verdict: str) -> None:
    (row,) = judge_memory(planned(total=total, at_least=at_least), int(9.9 * GIB))
    assert (row.verdict, row.measured) == (verdict, "9.90 GiB")
    assert not list(judge_memory(None, 1))
    assert not list(judge_memory(planned(), None))


@pytest.mark.slow
def test_a_failed_or_hanging_part_is_reported_as_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accelerator.LIMITS, "encode", 0.05)
    (row,) = run_part("encode", tmp_path, small=True)
    assert (row.what, row.verdict) == ("encode", "not done after 0.2 s")
    with monkeypatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "nowhere")
        (row,) = run_part("doctor", tmp_path, small=True)
    assert row.verdict == "ended with status 1"
    assert "nowhere" in row.measured


def test_a_peer_that_cannot_run_has_a_reason() -> None:
    assert why_no_peer("json", "cpu") == ""
    assert why_no_peer("no_such_peer", "cpu") == "no_such_peer is not installed (pip install -r requirements-bench.txt)"
    assert why_no_peer("json", "tpu") == "json does not run on a tpu here"
    if importlib.util.find_spec("torch"):
        assert "has no CUDA" in why_no_peer("torch", "gpu")


def test_a_report_is_a_table() -> None:
    here = {"devices": "8 x H100", "python": "3.11.7", "versions": {"jax": "0.10.2"}}
    text = to_markdown(here, [Row("a|b", "at least 1 ms", "2 ms", "ok")], 12.3, small=False)
    assert text.startswith("# 8 x H100\n")
    assert text.endswith(
        "| what | plan | measured | verdict |\n|:--|:--|:--|:--|\n| a\\|b | at least 1 ms | 2 ms | ok |\n"
    )


@pytest.mark.exhaustive
def test_all_parts_run_on_two_cpu_devices(tmp_path: Path) -> None:
    """Attention uses the TPU kernel as XLA runs it on a CPU."""
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "bench/accelerator.py", f"--out={tmp_path}", "--small"]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    values = json.loads((tmp_path / "values.json").read_text())
    rows = [Row(**row) for row in values["rows"]]
    assert {row.verdict for row in rows} == {"ok", "skipped", NO_PLAN, f"scores ok, time {NO_PLAN}"}, done.stdout
    assert done.returncode == 0
    peers = {"full, 4 pairs", "128 texts of"} if importlib.util.find_spec("torch") else {"train_step", "encode against"}
    skipped = {row.what for row in rows if row.verdict == "skipped" and "against its peers" not in row.what}
    assert skipped == {"search by faiss-gpu"}
    starts = ("devices", "attention flash", "training step", "encoding 8 passages", "32 queries on 2,000", "losses of")
    assert len(starts) + 1 == len(PARTS)
    assert all(any(row.what.startswith(start) for row in rows) for start in {*starts, *peers})
    report = (tmp_path / "report.md").read_text()
    assert all(row.measured in report for row in rows)
