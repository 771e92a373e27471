"""kill -9: whatever is killed, wherever, the same command goes on, and what comes out is what would have come out."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.conftest import Tiny, Trials
from tests.faults.scripts import Script, start
from tests.pipeline import contents, free_address

KILLS, CHAINS = 50, 5


def leftovers(folder: Path) -> list[str]:
    """What only a job that still runs may have there."""
    names = (path.name for path in folder.rglob("*"))
    return [name for name in names if name.endswith(".tmp") or "orbax-checkpoint-tmp" in name or name == ".lock"]


def vectors(folder: Path) -> dict[str, bytes]:
    """All that encoding leaves. The index of the texts is made by whoever first asks for them."""
    return {name: content for name, content in contents(folder).items() if not name.startswith("passages.")}


def trained(workdir: Path) -> dict[str, object]:
    """All that training leaves that must not depend on how often it was killed: digests of every leaf of every
    checkpoint that is kept, their metrics, and every step's."""
    found: dict[str, object] = {}
    for folder in sorted((workdir / "checkpoints").iterdir()):
        metadata = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
        found[folder.name] = (metadata["custom_metadata"]["digests"], (folder / "metrics" / "metrics").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{k: v for k, v in line.items() if k != "seconds_per_step"} for line in lines]
    for name in ("config.json", "contract.json", "data.json"):
        found[name] = (workdir / name).read_text()
    return found


Times = tuple[float, float, int]


def undisturbed(begin: Callable[..., Script], file: Path, folder: Path) -> Times:
    """How long it takes until the first file is there and to the end, in seconds, and how many system calls."""
    process, first = begin(count=str(file)), 0.0
    while process.poll(0.002) is None:
        if not first and folder.exists():
            first = time.monotonic() - process.started
    assert process.returncode == 0, process.told
    return first, time.monotonic() - process.started, int(file.read_text())


def chain(
    begin: Callable[..., Script], kills: int, random: np.random.Generator, times: tuple[float, float, int]
) -> int:
    """Starts it again and again, each time killed somewhere, until it ends by itself or was killed `kills` times; then
    once more without. How often it was killed."""
    first, last, calls = times
    for killed in range(kills):
        if random.random() < 0.5:
            number = int(random.integers(1, calls + 1))
            process = begin(kill_at=number if random.random() < 0.5 else -number)
            process.wait()
        else:
            process = begin()
            process.poll(random.uniform(0.8 * first, last))
            process.kill()
            process.wait()
        if process.returncode == 0:
            return killed
        assert process.returncode == -signal.SIGKILL, process.told
    process = begin()
    assert process.wait() == 0, process.told
    return kills


@pytest.mark.faults(1)
@pytest.mark.parametrize("seed", range(CHAINS))
def test_encoding(seed: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    folder = tiny.run / "embeddings"

    def begin(name: str, **faults: Any) -> Script:
        return start("encode.py", f"--workdir={tiny.run}", f"--corpus={tiny.data}", f"--name={name}", **faults)

    alone = f"alone{seed}"
    times = undisturbed(lambda **faults: begin(alone, **faults), tmp_path / "count", folder / alone)
    expected = vectors(folder / alone)
    assert len(expected) > 60
    random, killed = np.random.default_rng(seed), 0
    while killed < KILLS // CHAINS:
        name = f"killed{seed}.{killed}"
        done = chain(lambda **faults: begin(name, **faults), KILLS // CHAINS - killed, random, times)  # noqa: B023
        same = vectors(folder / name) == expected
        differ = [key for key, _ in vectors(folder / name).items() ^ expected.items()]
        for _ in range(done):
            trials.count(same, f"chain {name}: {differ}")
        killed += done


@pytest.mark.faults(2)
@pytest.mark.parametrize("seed", range(CHAINS))
def test_training(seed: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    def begin(workdir: Path, **faults: Any) -> Script:
        return start("train.py", *tiny.training(workdir, train__steps=12), **faults)

    alone = tmp_path / "alone"
    times = undisturbed(lambda **faults: begin(alone, **faults), tmp_path / "count", alone)
    expected = trained(alone)
    random, killed = np.random.default_rng(seed), 0
    while killed < KILLS // CHAINS:
        workdir = tmp_path / f"killed{killed}"
        done = chain(lambda **faults: begin(workdir, **faults), KILLS // CHAINS - killed, random, times)  # noqa: B023
        found = trained(workdir)
        wrong = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
        for _ in range(done):
            trials.count(not wrong and not leftovers(workdir), f"seed {seed}: {wrong} {leftovers(workdir)}")
        killed += done


@pytest.mark.faults(3)
@pytest.mark.parametrize("seed", range(CHAINS))
def test_two_processes(seed: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """Either is killed, or both; whoever is left is killed soon after, as what starts such jobs does it."""
    random, killed = np.random.default_rng(seed), 0

    def begin(workdir: Path, which: int = 0, **faults: Any) -> list[Script]:
        mesh = {"mesh__coordinator": free_address(), "mesh__num_processes": 2}
        each = [tiny.training(workdir, train__steps=12, **mesh, mesh__process_id=rank) for rank in range(2)]
        return [start("train.py", *flags, **(faults if rank == which else {})) for rank, flags in enumerate(each)]

    alone, count = tmp_path / "alone", tmp_path / "count"
    both, first = begin(alone, count=str(count)), 0.0
    while any(process.poll(0.002) is None for process in both):
        if not first and alone.exists():
            first = time.monotonic() - both[0].started
    assert [process.returncode for process in both] == [0, 0], "\n".join(process.told for process in both)
    last, calls, expected = time.monotonic() - both[0].started, int(count.read_text()), trained(alone)
    while killed < KILLS // CHAINS:
        workdir, here = tmp_path / f"killed{killed}", 0
        while True:
            which = int(random.integers(2))
            if killed + here == KILLS // CHAINS:
                both = begin(workdir)
            elif which == 0 and random.random() < 0.5:
                number = int(random.integers(1, calls // 2))
                both = begin(workdir, kill_at=number if random.random() < 0.5 else -number)
                both[0].wait()
            else:
                both = begin(workdir)
                both[which].poll(random.uniform(0.8 * first, last))
                both[which].kill()
            if any(process.poll(random.uniform(0, 0.3)) not in (0, None) for process in both):
                for process in both:
                    process.kill()
            statuses = [process.wait() for process in both]
            if statuses == [0, 0]:
                break
            assert -signal.SIGKILL in statuses, "\n".join(process.told for process in both)
            here += 1
        found = trained(workdir)
        wrong = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
        for _ in range(here):
            trials.count(not wrong and not leftovers(workdir), f"seed {seed}: {wrong} {leftovers(workdir)}")
        killed += here
