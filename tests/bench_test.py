"""`make bench`: a short run of its scripts, the check that the machine was idle, and what became slower than in an
earlier run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.all import SCRIPTS, became_slower, describe_load
from bench.profiles import imports, own_seconds
from bench.rounds import calibrate, can_import
from tests.pipeline import REPOSITORY


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run short comparisons on the devices that a user's process has."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "bench/all.py", "--short", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=clean, capture_output=True, text=True)


def results(ours: list[float], peer: list[float]) -> dict[str, Any]:
    case = {"case": "one", "ours": {"xla": ours}, "peers": {"numpy": peer}}
    return {"scripts": {"late": {"cases": [case], "calibrations": []}}}


@pytest.mark.slow
def test_one_run_writes_every_round_and_a_slower_number_is_reported(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    done = bench("--only=late", f"--out={new}")
    assert done.returncode == 0, done.stderr
    written = json.loads(new.read_text())
    assert written["scripts"].keys() == {"late"}
    assert written["versions"].keys() >= {"jax", "numpy"}
    assert written["cpu"]
    assert written["commit"]
    (case,) = written["scripts"]["late"]["cases"]
    assert len(case["ours"]["xla"]) == len(case["peers"]["numpy"]) == 5
    # One for each of five rounds, and one for the round that compiles.
    assert len(written["scripts"]["late"]["calibrations"]) == 6
    assert "calibrations" in done.stdout

    faster = deepcopy(written)
    times = faster["scripts"]["late"]["cases"][0]["ours"]
    times["xla"] = [second / 1000 for second in times["xla"]]  # compared with these times, this machine is slower now
    old.write_text(json.dumps(faster))
    done = bench("--only=late", f"--out={new}", f"--compare={old}")
    assert done.returncode == 1
    assert "SLOWER late, 1 queries of 32" in done.stdout

    old.write_text(json.dumps(faster | {"cores": 1000}))
    done = bench("--only=late", f"--out={new}", f"--compare={old}")
    assert done.returncode == 1
    assert "has cores 1000, and this machine has" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "slower"),
    [
        ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2], False),
        ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], True),
        ([1.0, 1.1, 1.2], [0.5, 0.6, 0.7], False),  # faster
        ([1.00, 1.01, 1.02], [1.03, 1.04, 1.05], False),  # slower by less than the margin
        ([1.0, 1.2, 3.0], [0.9, 1.4, 3.0], False),  # the difference is within the noise
    ],
)
def test_slower_means_beyond_the_quartiles_and_the_margin(old: list[float], new: list[float], slower: bool) -> None:
    ones = [1.0, 1.0, 1.0]
    assert bool(became_slower(results(old, ones), results(new, ones))) == slower
    busy = [10.0, 1.0, 5.0]  # a busy machine slows both
    both = [a * b for a, b in zip(new, busy, strict=True)]
    assert bool(became_slower(results(old, ones), results(both, busy))) == slower


@pytest.mark.parametrize("content", [None, "", "[]", '{"cpu": "x"}'])
def test_a_file_of_something_else_is_refused_before_anything_runs(content: str | None, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    if content is not None:
        old.write_text(content)
    done = bench("--only=late", f"--out={tmp_path / 'new.json'}", f"--compare={old}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --compare={old}: not results of bench/all.py (")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new.json").exists()


def test_a_busy_machine_is_reported() -> None:
    def sentence(*pairs: tuple[float, float]) -> str:
        return describe_load({"late": {"calibrations": pairs}})

    assert sentence((0.040, 0.99), (0.041, 0.98)) == "the machine was idle in all 2 calibrations"
    assert sentence((0.040, 0.99), (0.041, 0.70)).startswith("NOT IDLE in 1 of 2 calibrations: the work got 70%")
    assert "up to 1.50 times as long" in sentence((0.040, 0.99), (0.060, 0.99))
    seconds, share = calibrate()
    assert seconds > 0
    assert 0 < share < 1.05


def test_a_missing_peer_is_left_out_with_its_pip_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert can_import("json")
    assert not can_import("json", "no_such_module")
    assert capsys.readouterr().out.endswith(
        "left out: no_such_module cannot be imported (pip install -r requirements-bench.txt)\n"
    )


def test_an_operation_has_its_own_time_without_those_within() -> None:
    def event(name: str, start: int, duration: int) -> Any:
        return SimpleNamespace(name=name, start_ns=start * 10**9, duration_ns=duration * 10**9)

    events = [
        event("while", 0, 10),
        event("dot.1", 1, 4),
        event("dot.2", 6, 2),
        event("copy", 6, 1),
        event("dot", 20, 1),
    ]
    assert own_seconds(events) == {"while": (1, 4.0), "dot": (3, 6.0), "copy": (1, 1.0)}


def test_imports_are_added_by_package() -> None:
    lines = "import time: self [us] | cumulative | imported package\nimport time:       100 |        300 |   jax.core\n"
    lines += "import time:        50 |        400 | jax\nimport time:         7 |          7 |     numpy\nother\n"
    packages = imports(lines)
    assert {name: (count, round(seconds * 1e6)) for name, (count, seconds) in packages.items()} == {
        "jax": (2, 150),
        "numpy": (1, 7),
    }


@pytest.mark.exhaustive
def test_every_comparison_runs_with_small_sizes(tmp_path: Path) -> None:
    done = bench(f"--out={tmp_path / 'new.json'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{name}\n" in done.stdout for name in SCRIPTS)
