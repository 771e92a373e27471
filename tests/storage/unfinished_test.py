"""Leftovers of killed writers are removed by the next writer of the same path, but never while a process writes
them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxret.storage.atomic import atomic_write
from jaxret.storage.transaction import new_folder
from jaxret.storage.unfinished import lock, sweep, temporary_path
from tests.pipeline import environment


def left_over(path: Path, folder: bool = False, age: float = 3600.0) -> Path:
    """Create a leftover for `path`, as a writer on another machine would have left it `age` seconds ago."""
    temporary = path.with_name(f".{path.name}.{os.urandom(12).hex()}.tmp")
    if folder:
        temporary.mkdir()
        (temporary / "file").write_text("half")
    else:
        temporary.write_text("half")
    os.utime(temporary, (time.time() - age,) * 2)
    return temporary


@pytest.mark.parametrize("folder", [False, True])
def test_leftovers_of_a_killed_writer_are_removed(folder: bool, tmp_path: Path) -> None:
    old = left_over(tmp_path / "out", folder)
    other, young = left_over(tmp_path / "out2", folder), left_over(tmp_path / "out", folder, age=5)
    assert sweep(tmp_path / "out") == [old.name]
    assert sorted(tmp_path.iterdir()) == sorted((other, young))
    assert sweep(tmp_path / "absent" / "out") == []


KILLED = """
import os, sys
from pathlib import Path
from jaxret.storage.atomic import atomic_write
from jaxret.storage.transaction import new_folder
with (new_folder if sys.argv[2] == "True" else atomic_write)(Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="needs /proc")
@pytest.mark.parametrize("folder", [False, True])
def test_leftovers_of_a_process_that_has_ended_are_removed_at_once(folder: bool, tmp_path: Path) -> None:
    """They are removed even if the final path exists now."""
    path = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, str(path), str(folder)], env=environment(), check=False)
    assert len([*tmp_path.iterdir()]) == 1
    writing = temporary_path(path)  # a file of this process, which is running
    writing.mkdir() if folder else writing.touch()
    if folder:
        path.mkdir()
        (path / "file").touch()
        with pytest.raises(FileExistsError), new_folder(path):
            pass
        assert {entry.name for entry in tmp_path.iterdir()} == {"out", writing.name}
    else:
        with atomic_write(path):
            pass
        assert {entry.name for entry in tmp_path.iterdir()} == {"out", writing.name}


@pytest.mark.parametrize("folder", [False, True])
def test_files_being_written_are_kept(folder: bool, tmp_path: Path) -> None:
    writing = left_over(tmp_path / "out", folder)
    descriptor = os.open(writing, os.O_RDONLY)
    lock(descriptor)
    assert sweep(tmp_path / "out") == []
    os.close(descriptor)  # a dead writer has no lock
    assert sweep(tmp_path / "out") == [writing.name]


@pytest.mark.parametrize("folder", [False, True])
def test_without_locks_only_files_older_than_a_day_are_removed(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", without)
    left_over(tmp_path / "out", folder)
    assert sweep(tmp_path / "out") == []
    old = left_over(tmp_path / "out", folder, age=100_000)
    if folder:
        assert sweep(tmp_path / "out") == [], "a file in it was just written"
        os.utime(old / "file", (time.time() - 100_000,) * 2)
    assert sweep(tmp_path / "out") == [old.name]


@pytest.mark.slow
def test_concurrent_writers_remove_no_files_of_each_other(tmp_path: Path) -> None:
    """Several writers of one path at the same time all succeed, and no leftovers remain."""
    left_over(tmp_path / "file")
    left_over(tmp_path / "out", folder=True)
    with atomic_write(tmp_path / "file") as one:
        (unfinished,) = [path for path in tmp_path.iterdir() if path.name.startswith(".file")]
        os.utime(unfinished, (time.time() - 100_000,) * 2)
        with atomic_write(tmp_path / "file") as two:
            two.write("two")
        one.write("one")
    assert (tmp_path / "file").read_text() == "one"
    with new_folder(tmp_path / "out") as folder:
        os.utime(folder, (time.time() - 100_000,) * 2)
        assert sweep(tmp_path / "out") == []
        (folder / "file").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
