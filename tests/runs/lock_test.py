"""Only one job writes to a folder at a time, even if processes are killed, race each other, or belong to one job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxret.runs.lock import hold_folder
from jaxret.storage.atomic import StorageError
from jaxret.storage.lockfile import HOLDER, LOCK, LockedError
from tests.pipeline import REPOSITORY, environment, free_address, together

# A process that takes the lock, prints a line, keeps the lock until it reads a line, and ends as that line says.
HOLDING = """
import os, sys
from pathlib import Path
from jaxret.storage.lockfile import LockedError
from jaxret.runs.lock import hold_folder
try:
    with hold_folder(Path(sys.argv[1]), "holding"):
        print("held", flush=True)
        how = sys.stdin.readline().strip()
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise KeyError("x")
        if how == "kill":
            os.kill(os.getpid(), 9)
except LockedError:
    print("locked", flush=True)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(folder)],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def write_holder(folder: Path, **changes: Any) -> Path:
    """Write the record that a killed process leaves, with changes."""
    record = {"host": socket.gethostname(), "process": 1234567, "job": "train", "since": "then"}
    (folder / HOLDER).write_text(json.dumps({**record, **changes}))
    return folder / HOLDER


def test_the_error_names_the_holder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with hold_folder(folder, "train"):
        written = json.loads((folder / HOLDER).read_text())
        assert (written["host"], written["process"], written["job"]) == (socket.gethostname(), os.getpid(), "train")
        with pytest.raises(LockedError) as refused, hold_folder(folder, "train"):
            pass
        assert str(refused.value) == (
            f"{folder} is in use: train, process {os.getpid()} on {socket.gethostname()}, since {written['since']}; "
            "wait for it, or stop it"
        )
        with hold_folder(folder / "embeddings" / "x", "encode"):  # another job with another folder
            pass
        assert (folder / LOCK).exists()
    assert not (folder / ".lock").exists()
    with hold_folder(folder, "train"):
        pass


@pytest.mark.table
@pytest.mark.parametrize(("how", "status"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_the_lock_is_released_when_the_holder_ends(tmp_path: Path, how: str, status: int) -> None:
    process = start(tmp_path)
    assert said(process) == "held"
    with pytest.raises(LockedError, match=rf"holding, process {process.pid} on"), hold_folder(tmp_path, "train"):
        pass
    process.communicate(f"{how}\n", timeout=60)
    assert process.returncode == status
    assert not list(tmp_path.iterdir())


def test_a_killed_holders_lock_is_taken_over_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start(tmp_path)
    assert said(process) == "held"
    process.communicate("kill\n", timeout=60)
    assert (tmp_path / LOCK).exists()
    with hold_folder(tmp_path, "train"):
        assert json.loads((tmp_path / HOLDER).read_text())["process"] == os.getpid()
        with pytest.raises(LockedError, match=f"train, process {os.getpid()}"), hold_folder(tmp_path, "train"):
            pass
    (line,) = capfd.readouterr().err.splitlines()
    assert f"holding, process {process.pid} on" in line
    assert "that process is gone: taken over" in line


def test_a_record_of_another_host_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    path = write_holder(tmp_path, host="elsewhere")
    before = path.read_bytes()
    with pytest.raises(LockedError, match=rf"elsewhere, .*remove .*{path}"):
        hold_folder(tmp_path, "train").__enter__()
    assert path.read_bytes() == before
    path.unlink()
    with hold_folder(tmp_path, "train"):
        pass


@pytest.mark.parametrize("text", ["{", "[]", '{"host": 1}', "\0" * 512, '{"host": ' * 100_000])
def test_an_unreadable_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / HOLDER
    path.write_text(text)
    with pytest.raises(LockedError, match=rf"process 0 .*{path}"):
        hold_folder(tmp_path, "train").__enter__()


def test_killed_before_writing_the_record(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with hold_folder(tmp_path, "train"):
        assert json.loads((tmp_path / HOLDER).read_text())["process"] == os.getpid()
        (tmp_path / HOLDER).unlink()
        with (
            pytest.raises(LockedError, match="just begun; wait"),
            hold_folder(tmp_path, "train"),
        ):
            pass


def test_a_disk_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    refused = pytest.raises(LockedError, match=r"wait .*stop")
    with (
        pytest.warns(UserWarning, match="flock not supported"),
        hold_folder(tmp_path, "a"),
        refused,
        hold_folder(tmp_path, "b"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_leftovers_are_removed_under_the_lock(tmp_path: Path) -> None:
    leftover, other = tmp_path / f".ids.txt.{'0f' * 12}.tmp", tmp_path / ".mine.tmp"
    leftover.touch()
    other.touch()
    with hold_folder(tmp_path, "encode"):
        assert not leftover.exists()
        assert other.exists()
        leftover.touch()
        with pytest.raises(LockedError), hold_folder(tmp_path, "encode"):
            pass
        assert leftover.exists(), "a refused job removes nothing"


def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: str, flags: int, *_: object) -> int:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageError, match=r"\.lock .*written: .*read-only"):
        hold_folder(tmp_path, "train").__enter__()


RACER = """
import os, sys, time
from pathlib import Path
from jaxret.storage.lockfile import LockedError
from jaxret.runs.lock import hold_folder
print("ready", flush=True)
for line in sys.stdin:
    folder, at = line.split()
    while time.time() < float(at): pass
    try:
        with hold_folder(Path(folder), "race"):
            with open(Path(folder) / "winners", "a") as file: file.write(f"{os.getpid()}\\n")
            print("won", flush=True)
            sys.stdin.readline()
    except LockedError:
        print("lost", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.daily("True")
@pytest.mark.exhaustive
@pytest.mark.parametrize("dead", [True, False])
def test_one_of_many_processes_gets_the_lock(tmp_path: Path, dead: bool) -> None:
    """Many times, real processes start at the same time, with a lock of a dead process or with none."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        for _ in range(4)
    ]
    try:
        assert [said(racer) for racer in racers] == ["ready"] * 4
        for trial in range(60):
            folder = tmp_path / str(trial)
            folder.mkdir()
            if dead:
                write_holder(folder)
            at = time.time() + 0.01
            for racer in racers:
                assert racer.stdin
                racer.stdin.write(f"{folder} {at}\n")
            assert sorted(said(racer) for racer in racers) == ["lost"] * 3 + ["won"], trial
            for racer in racers:
                assert racer.stdin
                racer.stdin.write("next\n")
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    outcomes = []

    def work(gate: threading.Barrier) -> None:
        gate.wait()
        try:
            with hold_folder(tmp_path, "train"):
                outcomes.append("won")
                gate.wait()
        except LockedError:
            outcomes.append("lost")
            gate.wait()

    gate = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(gate,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost"] * 3 + ["won"]


JOB = """
import json, sys, time
from pathlib import Path
from jaxret.parallel.processes import initialize_distributed
from jaxret.storage.lockfile import LockedError
from jaxret.runs.lock import hold_folder
rank, coordinator, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
initialize_distributed(coordinator, 2, rank)
found = []
if rank == 0: time.sleep(1)  # the other comes first
with hold_folder(folder, "encode"):
    found.append((folder / ".lock.json").read_text())
    if rank == 1:
        time.sleep(1)  # the other is done first
        found.append((folder / ".lock").exists())
try:
    with hold_folder(folder / "taken", "encode"):
        found.append("held")
except LockedError as error:
    found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_the_processes_of_one_job_are_one_owner(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    write_holder(tmp_path / "taken", host="elsewhere")
    address = free_address()
    done = together(*([sys.executable, "-c", JOB, str(rank), address, str(tmp_path)] for rank in range(2)))
    assert [status for status, _, _ in done] == [0, 0], done
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in done)
    assert first[0] == second[0], "both see the lock of process 0"
    assert second[1] is True, "the lock exists until the last process has ended"
    assert first[-1] == second[-1]
    assert "on elsewhere" in first[-1]
    assert not (tmp_path / LOCK).exists()
