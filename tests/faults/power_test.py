"""A power cut: files that were written but not flushed to the disk are empty afterwards, and the same command
continues.

A C library that is loaded before others (shim.c) logs which files the whole process, including C++, opens, flushes,
renames and removes, and can kill it at any of these operations. Names in folders are assumed to be on the disk.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import Alone, leftovers, trained, trained_alone, training  # noqa: F401
from tests.faults.names_test import commands, verb_words
from tests.faults.scripts import start

CUTS = 12


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of the compiled library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    flags = ["-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    done = subprocess.run([compiler, *flags], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cc cannot make the library here: {done.stderr.splitlines()[0]}")
    return str(library)


def operations(log: Path) -> list[list[str]]:
    """Return the operations of a log. Each is a list of a letter and paths."""
    lines = log.read_bytes().split(b"\0\n") if log.exists() else []
    return [[part.decode() for part in (line[:1], *line[2:].split(b"\0"))] for line in lines if line]


def unflushed(log: Path) -> list[Path]:
    """Return the existing files that were opened for writing after their last flush."""
    dirty: set[str] = set()
    for kind, path, *new in operations(log):
        if kind == "W":
            dirty.add(path)
        elif kind == "S":
            dirty.discard(path)
        else:
            moved = {name for name in dirty if name == path or name.startswith(f"{path}/")}
            dirty -= moved
            if new:
                dirty = {name for name in dirty if name != new[0] and not name.startswith(f"{new[0]}/")}
                dirty |= {new[0] + name.removeprefix(path) for name in moved}
    return [Path(name) for name in sorted(dirty) if Path(name).is_file()]


def shimmed(folder: Path, log: Path, kill_at: int = 0) -> dict[str, str]:
    """Return the environment of a process whose operations in a folder are logged."""
    return {"SHIM_ROOT": str(folder), "SHIM_LOG": str(log), "SHIM_KILL": str(kill_at)}


@pytest.mark.faults(28)
def test_power_cut(tiny: Tiny, shim: str, trained_alone: Alone, tmp_path: Path, trials: Trials) -> None:  # noqa: F811
    """The power is cut anywhere, in some runs twice: the result is that without a cut."""
    arguments = training_arguments(tiny, tmp_path / "whole")
    whole = start("train.py", *arguments, env=shimmed(tmp_path / "whole", tmp_path / "log"), preload=shim)
    assert whole.wait() == 0, whole.output
    count = len(operations(tmp_path / "log"))
    assert count > 300, "the library was loaded"
    random = np.random.default_rng(0)
    for number in range(CUTS):
        folder, said = tmp_path / f"cut{number}", []
        for _ in range(1 + number % 2):
            log = tmp_path / f"log{number}"
            log.unlink(missing_ok=True)
            place = int(random.integers(1, count))
            env = shimmed(folder, log, place)
            process = start("train.py", *training_arguments(tiny, folder), env=env, preload=shim)
            killed = process.wait() == -signal.SIGKILL
            emptied = unflushed(log) if killed else []
            for path in emptied:
                path.write_bytes(b"")
            said.append(f"cut at {place}: {process.returncode}, emptied {[path.name for path in emptied]}")
        last = start("train.py", *training_arguments(tiny, folder))
        ended = last.wait() == 0
        same = ended and trained(folder) == trained_alone.result
        trials.count(same and not leftovers(folder), f"{said}: {last.output} {leftovers(folder)}")


@pytest.mark.faults(28)
def test_flushes_that_the_disk_forgets(
    tiny: Tiny,
    shim: str,
    trained_alone: Alone,  # noqa: F811
    tmp_path: Path,
    trials: Trials,
) -> None:
    """A disk that reports a flush, but loses it in a power cut soon afterwards: an error names the file, or the result
    is the same."""
    arguments = training_arguments(tiny, tmp_path / "whole")
    whole = start("train.py", *arguments, env=shimmed(tmp_path / "whole", tmp_path / "log"), preload=shim)
    assert whole.wait() == 0, whole.output
    done = operations(tmp_path / "log")
    flushes = [number for number, (kind, *_) in enumerate(done, 1) if kind == "S"]
    random = np.random.default_rng(0)
    for number, place in enumerate(random.choice(flushes, CUTS, replace=False).tolist()):
        folder, log = tmp_path / f"forgot{number}", tmp_path / f"log{number}"
        env = shimmed(folder, log, place + int(random.integers(1, 9))) | {"SHIM_FORGET": str(place)}
        start("train.py", *training_arguments(tiny, folder), env=env, preload=shim).wait()
        lost = unflushed(log)
        for path in lost:
            path.write_bytes(b"")
        again = start("train.py", *training_arguments(tiny, folder))
        again.wait()
        named = again.returncode == 1 and any(str(path.relative_to(folder)) in again.stderr for path in lost)
        same = again.returncode == 0 and trained(folder) == trained_alone.result
        trials.count(named or same, f"{place}: emptied {lost}: {again.output}", detected=named)


def training_arguments(tiny: Tiny, folder: Path) -> list[str]:
    return tiny.training(folder, train__steps=8)


# Files that can be computed again, or that no command reads.
EPHEMERAL = ("events.out.tfevents", ".lock", "passages.")


@pytest.mark.faults(28)
def test_results_are_flushed_to_the_disk(tiny: Tiny, shim: str, tmp_path: Path, trials: Trials) -> None:
    """When a command ends, all files that it has written are flushed."""
    (tiny.root / "more.jsonl").write_text('{"_id": "more", "text": "river market"}\n')
    folder = tmp_path / "root"
    shutil.copytree(tiny.data, folder / "sets" / "one")
    for name, arguments in commands(tiny, folder, tiny.data).items():
        log = tmp_path / name.replace(" ", "-")
        done = start("jaxret/__main__.py", *verb_words(name), *arguments, env=shimmed(folder, log), preload=shim)
        assert done.wait() == 0, done.output
        lost = [path.name for path in unflushed(log) if not any(part in path.name for part in EPHEMERAL)]
        trials.count(not lost, f"{name}: {lost}")
