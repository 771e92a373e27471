"""Full and broken disks: the error is one line with the file and the cause; existing files remain, and the same command
succeeds on a working disk."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import leftovers, trained, vectors
from tests.faults.scripts import Script, refusal, run

KIB = 1024
CAUSES = (
    *("disk is full", "quota", "input/output error", "larger than this process may write", "only a part of it"),
    *("No space left on device", "Input/output error", "File too large"),  # messages of TensorStore
)


def resize(disk: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(disk)], check=True)


def used(disk: Path) -> int:
    usage = os.statvfs(disk)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize // KIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk in memory whose size can be set."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def names_cause(process: Script, workdir: Path) -> bool:
    message = refusal(process)
    return str(workdir) in message and any(cause in message for cause in CAUSES)


def encoding(tiny: Tiny, workdir: Path) -> list[str]:
    return [f"--workdir={workdir}", f"--corpus={tiny.data}", "--name=disk"]


def copy(tiny: Tiny, workdir: Path) -> None:
    shutil.copytree(tiny.run, workdir, ignore=shutil.ignore_patterns("embeddings"))


@pytest.mark.faults(14)
def test_full_while_encoding(tiny: Tiny, disk: Path, trials: Trials) -> None:
    expected = vectors(tiny.run / "embeddings" / "data")
    workdir = disk / "run"
    copy(tiny, workdir)
    free = used(disk)
    for room in (0, 4, 12, 40, 100, 180):  # KiB of room; all files together need more
        resize(disk, free + room)
        done = run("encode.py", *encoding(tiny, workdir))
        trials.count(names_cause(done, workdir), f"{room} KiB: {done.output}", detected=True)
        resize(disk, free + 16 * KIB)
        done = run("encode.py", *encoding(tiny, workdir))
        same = done.returncode == 0 and vectors(workdir / "embeddings" / "disk") == expected
        trials.count(same, f"after {room} KiB: {done.output} {leftovers(workdir)}")
        shutil.rmtree(workdir / "embeddings")


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("disk") / "alone"
    done = run("train.py", *tiny.training(workdir))
    assert done.returncode == 0, done.output
    return workdir


@pytest.mark.faults(14)
def test_full_while_training(tiny: Tiny, alone: Path, disk: Path, trials: Trials) -> None:
    for room in (8, 60, 200, 400, 700):
        workdir = disk / str(room)
        resize(disk, used(disk) + room)
        done = run("train.py", *tiny.training(workdir))
        trials.count(names_cause(done, workdir), f"{room} KiB: {done.output}", detected=True)
        resize(disk, 64 * KIB)
        done = run("train.py", *tiny.training(workdir))
        same = done.returncode == 0 and trained(workdir) == trained(alone)
        trials.count(same and not leftovers(workdir), f"after {room} KiB: {done.output} {leftovers(workdir)}")
        shutil.rmtree(workdir)


BROKEN = [
    ("fsync", errno.EIO),
    ("replace", errno.EIO),
    ("fsync", errno.EDQUOT),
    ("replace", errno.ENOSPC),
]


@pytest.mark.faults(15)
@pytest.mark.parametrize(("call", "number"), BROKEN)
def test_errors_while_encoding(call: str, number: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    expected = vectors(tiny.run / "embeddings" / "data")
    workdir = tmp_path / "run"
    copy(tiny, workdir)
    for first in (1, 20, 45):
        done = run("encode.py", *encoding(tiny, workdir), fail=[call, first, number])
        trials.count(names_cause(done, workdir), f"{call} {first}: {done.output}", detected=True)
        done = run("encode.py", *encoding(tiny, workdir))
        same = done.returncode == 0 and vectors(workdir / "embeddings" / "disk") == expected
        trials.count(same, f"after {call} {first}: {done.output}")
        shutil.rmtree(workdir / "embeddings")


@pytest.mark.faults(15)
@pytest.mark.parametrize("broken", ["fsync", "replace", "size"])
def test_errors_while_training(broken: str, tiny: Tiny, alone: Path, tmp_path: Path, trials: Trials) -> None:
    faults: list[dict[str, Any]] = [{"fail": [broken, first, errno.EIO]} for first in (1, 8)]
    if broken == "size":
        faults = [{"file_size": 2000}, {"file_size": 40_000}]
    for number, fault in enumerate(faults):
        workdir = tmp_path / str(number)
        done = run("train.py", *tiny.training(workdir), **fault)
        trials.count(names_cause(done, workdir), f"{fault}: {done.output}", detected=True)
        done = run("train.py", *tiny.training(workdir))
        same = done.returncode == 0 and trained(workdir) == trained(alone)
        trials.count(same and not leftovers(workdir), f"after {fault}: {done.output} {leftovers(workdir)}")


@pytest.mark.faults(15)
def test_limited_files_while_encoding(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    expected = vectors(tiny.run / "embeddings" / "data")
    workdir = tmp_path / "run"
    copy(tiny, workdir)
    for size in (20, 500, 1500):
        done = run("encode.py", *encoding(tiny, workdir), file_size=size)
        trials.count(names_cause(done, workdir), f"{size} bytes: {done.output}", detected=True)
        done = run("encode.py", *encoding(tiny, workdir))
        same = done.returncode == 0 and vectors(workdir / "embeddings" / "disk") == expected
        trials.count(same, f"after {size} bytes: {done.output}")
        shutil.rmtree(workdir / "embeddings")
