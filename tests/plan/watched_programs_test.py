"""The needs of each watched program, compiled for chips that are absent, stay within their bounds."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jaxret.parallel.chips import parse_topology
from jaxret.plan.compilation import missing_compiler
from tests.pipeline import REPOSITORY, command, environment
from tests.plan.watched_programs import (
    COMMON,
    SPLIT,
    WATCHED_PROGRAMS,
    WatchedProgram,
    broken_bounds,
    split_collectives,
)

I3 = {"head.name": "i3", "data.pseudo_queries": "query"}
HEADS = (  # heads with new parameters, or which use the word table in another way
    WatchedProgram("v5e:4x4", {**SPLIT, "head.name": "aggretriever"}, 2.15, split_collectives(785, 172, 192, 228)),
    WatchedProgram("v5e:4x4", {**SPLIT, **I3}, 2.2, split_collectives(880, 189, 287, 265)),
)
SCALE = REPOSITORY / "docs" / "scale.md"


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", [*WATCHED_PROGRAMS, *HEADS], ids=lambda row: row.name)
def test_a_program_stays_within_its_bounds(row: WatchedProgram) -> None:
    topology = parse_topology(row.topology)
    if problem := missing_compiler(topology):
        pytest.skip(problem)
    keys = [f"--config.{key}={value}" for key, value in (COMMON | row.options).items()]
    verb = [] if row.verb == "train" else [row.verb]
    flags = ["--config=configs/base.py", f"--topology={topology}", "--json", "--advice=false"]
    lengths = [f"--lengths={','.join(map(str, row.lengths))}"] if row.lengths else []
    if row.verb == "search":
        verb += [f"--{name}={value}" for name, value in row.search._asdict().items() if name != "block_passages"]
    arguments = command("-m", "jaxret", "plan", *verb, *flags, *lengths, *keys)
    done = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)["plan"]
    assert broken_bounds(row, values) == []
    assert values["warnings"] == []
    counted = sum(kind["flops"] for kind in values["flops"] if kind["part"] != "optimizer")
    chips = topology.of_host if row.verb == "search" else topology
    assert values["device_flops"] * chips.devices == pytest.approx(counted, rel=0.02)


def test_the_documentation_has_every_program() -> None:
    text = SCALE.read_text()
    assert [row.name for row in WATCHED_PROGRAMS if f"| {row.name} |" not in text] == []


def plan(gib: float, kind: str, megabytes: float) -> dict[str, Any]:
    moved = {"kind": kind, "times": 2, "bytes": megabytes * 1e6 / 2}
    return {"memory": {"total": gib * 2**30}, "collectives": [moved]}


def test_an_exceeded_bound_is_named() -> None:
    row = WatchedProgram("v5e:4x4", {}, gib=2.0, megabytes={"all-reduce": 100})
    assert broken_bounds(row, plan(1.9, "all-reduce", 99.0)) == []
    assert broken_bounds(row, plan(2.1, "all-reduce", 99.0)) == ["2.10 GiB on a device, at most 2.0 expected"]
    assert broken_bounds(row, plan(1.9, "all-reduce", 101.0)) == ["101.0 MB of all-reduce, at most 100 expected"]
    assert broken_bounds(row, plan(1.9, "all-to-all", 99.0)) == ["99.0 MB of all-to-all, at most 1 expected"]
    assert broken_bounds(row, plan(1.9, "all-to-all", 0.9)) == []
    for gathers in ((1, 60), (2, 40)):
        (bound,) = broken_bounds(
            row._replace(gathers=gathers, megabytes={"all-gather": 100}), plan(1, "all-gather", 99.0)
        )
        assert bound == f"2 all-gathers of up to 49.5 MB, at most {gathers[0]} of {gathers[1]} MB expected"
    assert (
        broken_bounds(row._replace(gathers=(2, 50), megabytes={"all-gather": 100}), plan(1, "all-gather", 99.0)) == []
    )
    overlapping = row._replace(overlapped=0.3)
    assert broken_bounds(overlapping, plan(1.9, "all-reduce", 99.0) | {"overlapped": 0.31}) == []
    (bound,) = broken_bounds(overlapping, plan(1.9, "all-reduce", 99.0) | {"overlapped": 0.2})
    assert bound == "20% of sent bytes during products, at least 30% expected"
    row = row._replace(traffic=1.5)
    assert broken_bounds(row, plan(1.9, "all-to-all", 0.9) | {"traffic": {"bytes": 3.0, "products": 2}}) == []
    (bound,) = broken_bounds(row, plan(1.9, "all-to-all", 0.9) | {"traffic": {"bytes": 4.0, "products": 2}})
    assert bound == "2.00 times the products' traffic of main memory, at most 1.5 expected"
    (bound,) = broken_bounds(row, plan(1.9, "all-to-all", 0.9) | {"traffic": {"bytes": None, "products": 2}})
    assert bound == "unknown traffic of main memory, at most 1.5 times the products' expected"


@pytest.mark.exhaustive
def test_the_compiler_ends_with_the_plan(tmp_path: Path) -> None:
    topology = parse_topology("v5e:4x4")
    if problem := missing_compiler(topology):
        pytest.skip(problem)
    arguments = command("-m", "jaxret", "plan", "--config=configs/base.py", f"--topology={topology}")
    plan = subprocess.Popen(arguments, cwd=REPOSITORY, env=environment() | {"TMPDIR": str(tmp_path)})
    try:
        while not (children := Path(f"/proc/{plan.pid}/task/{plan.pid}/children").read_text().split()):
            assert plan.poll() is None
            time.sleep(0.05)
        plan.send_signal(signal.SIGTERM)
        assert plan.wait(30) == 128 + signal.SIGTERM
    finally:
        plan.kill()
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert not list(tmp_path.glob("jaxret-plan-*"))
