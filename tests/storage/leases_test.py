"""Pieces of work have one owner at a time, whichever process is killed, stopped or resumed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.storage.atomic import StorageError, atomic_write, read_json
from jaxret.storage.leases import Lease, Leases
from tests.pipeline import REPOSITORY, environment

FAR = {"host": "another-host"}


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[Leases]:
    with Leases(tmp_path / "shared") as actual:
        yield actual


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Leases]:
    """Leases of another job: the owner file alone decides who owns one."""
    with Leases(tmp_path / "shared") as actual:
        yield actual


def say(lease: Lease, silent: float = 0, **owner: Any) -> None:
    """Give a lease to another process, which renewed it this many seconds ago."""
    file = lease.work / "owner.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | owner))
    os.utime(file, (file.stat().st_mtime - silent,) * 2)


def claimed(leases: Leases, name: str = "a") -> Lease:
    lease = leases.claim(name)
    assert lease
    return lease


def write(path: Path, lease: Lease) -> bool:
    def publish() -> None:
        with atomic_write(path, work=lease.work) as file:
            file.write("whole")

    return lease.publish(publish)


def test_pieces_without_a_living_owner_are_free(leases: Leases, others: Leases) -> None:
    assert leases.is_free("a")
    lease = claimed(others)
    assert not leases.is_free("a")
    say(lease, silent=1000, **FAR)
    assert leases.is_free("a")
    say(lease, silent=0, **FAR)
    assert not leases.is_free("a")
    others.release(lease)
    assert leases.is_free("a")


def test_one_job_at_a_time_holds_a_lease(leases: Leases, others: Leases) -> None:
    lease = claimed(leases)
    assert others.claim("a") is None
    assert leases.claim("a") is None
    assert others.claim("b")
    leases.release(lease)
    assert not lease.is_held
    assert others.claim("a")


def test_the_owner_is_on_disk_before_it_has_the_lease(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, jobs would wait for the owner of an empty file."""
    flushed: list[tuple[str, bool, list[str]]] = []

    def flush(path: Path) -> None:
        flushed.append((path.name, "process" in path.read_text(), leases.names()))

    monkeypatch.setattr("jaxret.storage.leases.sync", flush)
    claimed(leases)
    assert flushed == [("owner.json", True, [])]


def test_one_of_many_jobs_gets_a_lease(tmp_path: Path) -> None:
    jobs, actual, together = [Leases(tmp_path) for _ in range(8)], [], threading.Barrier(8)

    def ask(job: Leases) -> None:
        for turn in range(20):
            together.wait()
            actual.append((turn, job.claim(str(turn))))

    threads = [threading.Thread(target=ask, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turn for turn, lease in actual if lease) == list(range(20))


def test_the_first_published_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept even by a job that checked before the file existed, and got the lease afterwards."""
    claim = Leases.claim
    seen: list[Leases] = []

    def late(self: Leases, name: str) -> Lease | None:
        if not seen:
            seen.append(self)
            with Leases(tmp_path) as faster:
                faster.publish_once(tmp_path / "begun.json", {"by": "the faster"})
        return claim(self, name)

    monkeypatch.setattr(Leases, "claim", late)
    with Leases(tmp_path) as slower:
        slower.publish_once(tmp_path / "begun.json", {"by": "the slower"})
    assert read_json(tmp_path / "begun.json") == {"by": "the faster"}
    assert [path.name for path in tmp_path.iterdir()] == ["begun.json"]


@pytest.mark.parametrize("ahead", [-1, 1])
def test_a_lease_without_renewal_expires(ahead: int, leases: Leases, others: Leases) -> None:
    """The disk's clock counts. ahead=1: the clock was set back after the last renewal."""
    lease = claimed(others)
    say(lease, -ahead * (leases.bound - 20), **FAR)
    assert leases.claim("a") is None
    say(lease, -ahead * (leases.bound + 20))
    taken = leases.claim("a")
    assert taken
    assert taken.is_held
    assert not lease.is_held


def test_the_owner_sets_the_duration_of_its_lease(leases: Leases, others: Leases) -> None:
    """A job that renews rarely does not lose its lease to an impatient one, and a patient job does not wait longer than
    the owner's duration."""
    lease = claimed(others)
    say(lease, leases.bound + 20, **FAR, bound=leases.bound + 40)
    assert leases.claim("a") is None
    say(lease, leases.bound + 20, bound=leases.bound)
    assert leases.claim("a")


def test_clocks_of_hosts_are_not_used(leases: Leases, others: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    say(claimed(others), 5, **FAR)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert leases.claim("a") is None


def test_a_dead_process_of_this_host_is_taken_over_at_once(
    leases: Leases, others: Leases, capsys: pytest.CaptureFixture[str]
) -> None:
    gone: dict[str, Any] = {"process": 4, "started": "before"}
    say(claimed(others), **gone, numbers="of another container")
    assert leases.claim("a") is None
    say(claimed(others, "b"), **gone)
    assert leases.claim("b")
    assert "b was claimed by process 4 on" in capsys.readouterr().err


def test_boot_ids_distinguish_hosts_of_the_same_name(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host uses the same process numbers, and was booted at another time; it is unknown whether its processes
    have ended."""
    read = Path.read_text
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path, *_, **__: "boot" if path.name == "boot_id" else read(path))
        others = Leases(leases.folder)
        lease = claimed(others)
    say(lease, process=4, started="before")
    assert leases.claim("a") is None
    say(lease, leases.bound + 20)
    assert leases.claim("a")


def test_a_lease_without_owner_expires(leases: Leases, others: Leases, capsys: pytest.CaptureFixture[str]) -> None:
    """A lease that was only half removed has no owner, for example. The reason for waiting is printed once."""
    lease = claimed(others)
    assert leases.claim("a") is None
    assert capsys.readouterr().err == ""
    (lease.work / "owner.json").unlink()
    for _ in range(2):
        assert leases.claim("a") is None
    owner = lease.work / "owner.json"
    assert capsys.readouterr().err == (
        f"{leases.folder}: a is with process ? on an unknown host ({owner} is lost or damaged); it is "
        "taken over after 300 s without a change, because that job may be running on another host\n"
    )
    os.utime(lease.work, (0, 0))
    assert leases.claim("a")


def test_waiting_for_a_silent_owner_is_explained(
    leases: Leases, others: Leases, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, after a power cut: the process may belong to another boot, or to another host of the same name."""
    lease = claimed(others)
    say(lease, 50, numbers="another boot", process=7)
    assert leases.claim("a") is None
    assert capsys.readouterr().err == ""
    say(lease, 70)
    assert leases.claim("a") is None
    assert "a is with process 7 on" in (said := capsys.readouterr().err)
    assert "(silent for 70 s); it is taken over after 300 s" in said


@pytest.mark.parametrize("when", ["mkdir", "utime", "rename"])
def test_directories_removed_meanwhile_are_made_again(
    when: str, leases: Leases, others: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that completes the folder removes them while another job gets a lease."""
    claimed(others, "b")
    had = claimed(others) if when == "utime" else None  # the time of an existing lease is read
    act = getattr(os, when)

    def after_clearing(path: Any, *rest: Any, **more: Any) -> None:
        if when != "mkdir" or Path(path).parent.name.startswith(".lease."):
            others.clear()
        act(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, when, after_clearing)
        assert leases.claim("a") is None
    if had:
        others.release(had)
    assert leases.claim("a")


@pytest.mark.parametrize("text", ["", "[]", '{"process": []}', "{" * 9999])
def test_an_owner_without_a_duration_expires(text: str, leases: Leases, others: Leases) -> None:
    lease = claimed(others)
    (lease.work / "owner.json").write_text(text)
    assert leases.claim("a") is None
    os.utime(lease.work / "owner.json", (0, 0))
    assert leases.claim("a")


def test_a_job_that_lost_its_lease_publishes_nothing(leases: Leases, others: Leases, tmp_path: Path) -> None:
    """It publishes neither before the new owner has published, nor after; neither what it had begun, nor anything
    new."""
    for name in "abc":
        lease = claimed(others, name)
        say(lease, 2 * leases.bound, **FAR)
        if name == "c":  # control: here, the job still has its lease
            assert write(tmp_path / name, lease)
            continue

        def slowly(lease: Lease = lease, name: str = name) -> None:
            with atomic_write(tmp_path / name, work=lease.work) as file:
                file.write("half")
                assert leases.claim(name)

        assert lease.publish(slowly) is False
        assert not (tmp_path / name).exists()
        assert not write(tmp_path / name, lease)
        with pytest.raises(StorageError, match="its folder is gone"), atomic_write(tmp_path / name, work=lease.work):
            pass
        assert not (tmp_path / name).exists()


def test_other_errors_are_raised(leases: Leases) -> None:
    lease = claimed(leases)

    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    for number in (errno.ENOSPC, errno.ENOENT):
        with pytest.raises(OSError, match=os.strerror(number)):
            lease.publish(lambda: fail(number))  # noqa: B023
    say(lease, 1e6, **FAR)
    with Leases(leases.folder) as others:
        assert others.claim("a")
        assert lease.publish(lambda: fail(errno.ESTALE)) is False
        # Without a lease, `publish` does not call the function.
        assert lease.publish(lambda: fail(errno.ENOSPC)) is False


def test_a_failed_takeover_is_an_error(leases: Leases, others: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    say(claimed(others), 1e6, **FAR)

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", refused)
        with pytest.raises(StorageError, match=r"shared .*written: .*permission"):
            leases.claim("a")


def test_a_living_job_renews_its_leases(tmp_path: Path) -> None:
    with Leases(tmp_path, bound=0.2) as leases:
        owner = claimed(leases).work / "owner.json"
        os.utime(owner, (0, 0))
        for _ in range(1000):
            if owner.stat().st_mtime > 0:
                return
            time.sleep(0.01)
    pytest.fail("the lease was not renewed")


def test_nothing_remains_without_published_files(tmp_path: Path) -> None:
    """The folder itself does not exist until something is published."""
    folder = tmp_path / "new"
    with Leases(folder) as leases:
        assert not folder.exists()
        claimed(leases)
        claimed(leases, "b")
    assert not folder.exists()
    with Leases(folder) as leases:
        assert write(folder / "file", claimed(leases))
    assert [path.name for path in folder.iterdir()] == ["file"]
    with Leases(folder) as leases, Leases(folder) as others:
        theirs, ours = claimed(others), claimed(leases, "b")
        leases.clear()
        assert (theirs.is_held, ours.is_held) == (False, True)
        assert others.claim("c") or others.claim("c")  # the directory it had prepared may be removed, too
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_leftovers_of_dead_jobs_are_removed_at_the_end(tmp_path: Path) -> None:
    """Leases, a prepared directory, and unfinished ones are removed; those of a running job stay."""
    script = """if True:
        import os, sys
        from pathlib import Path
        from jaxret.storage.leases import Leases
        leases = Leases(Path(sys.argv[1]))
        assert leases.claim("part-0") and leases.claim("part-1")
        leases._prepare_spare()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", script, tmp_path], env=environment(), cwd=REPOSITORY, check=True)
    # A deletion leaves the first, a preparation the second.
    for unfinished in ("owner.json", "0123456789abcdef/owner.json"):
        file = tmp_path / f".lease.{len(unfinished)}.unfinished" / unfinished
        file.parent.mkdir(parents=True)
        file.touch()
    assert len(list(tmp_path.iterdir())) == 5
    with Leases(tmp_path) as living:
        theirs = claimed(living, "part-1")
        living.is_free("part-1")
        with Leases(tmp_path):
            pass
        assert theirs.is_held
        assert living.claim("part-2"), "its prepared directory still exists"
    assert list(tmp_path.iterdir()) == []


def test_a_removed_folder_is_not_made_again(leases: Leases) -> None:
    """Neither publishing nor the next lease creates it again."""
    lease = claimed(leases)
    shutil.rmtree(leases.folder)
    assert not write(leases.folder / "file", lease)
    with pytest.raises(StorageError, match=r"shared .*written: .*folder"):
        leases.claim("b")
    assert not leases.folder.exists()


def test_a_failed_preparation_leaves_no_files(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(StorageError, match="the disk is full"):
            leases.claim("a")
    assert not list(leases.folder.iterdir())


def test_the_time_of_the_disk_is_cached(leases: Leases, others: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed(others)
    requests: list[Path] = []
    touch = os.utime

    def noted(path: Path) -> None:
        requests.append(path)
        touch(path)

    monkeypatch.setattr(os, "utime", noted)
    assert [leases.claim("a") for _ in range(20)] == [None] * 20
    assert len(requests) == 1


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        Leases(tmp_path / "file") as leases,
        pytest.raises(StorageError, match=r"file .*written: .*file"),
    ):
        leases.claim("a")


# A job that publishes every piece without an owner, each after a while, and records its pieces.
JOB = """
import sys, time
from pathlib import Path
from jaxret.storage.leases import Leases
from jaxret.storage.atomic import atomic_write
folder, pieces, me = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def publish(path, lease):
    with atomic_write(path, work=lease.work) as file:
        file.write(me)
        time.sleep(0.04)

with Leases(folder, bound=0.5) as leases:
    while left := [n for n in range(pieces) if not (folder / f"piece{n}").exists()]:
        for n in left:
            lease = leases.claim(str(n))
            if not lease:
                continue
            path = folder / f"piece{n}"
            if not path.exists() and lease.publish(lambda: publish(path, lease)):
                with open(folder / "log", "a") as log:
                    log.write(f"{n}\\n")
            leases.release(lease)
        time.sleep(0.02)
    leases.clear()
"""


def test_jobs_that_are_killed_and_stopped_at_random(tmp_path: Path) -> None:
    """In the end, each piece exists and was published once; its job may have been killed before it recorded this."""
    random, pieces = np.random.default_rng(0), 60

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", JOB, str(tmp_path / "shared"), str(pieces), name]
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stderr=subprocess.DEVNULL)

    (tmp_path / "shared").mkdir()
    jobs, killed = [start(f"job{n}") for n in range(3)], 0
    while killed < 6 and any(job.poll() is None for job in jobs):
        time.sleep(random.uniform(0.05, 0.25))
        place = int(random.integers(len(jobs)))
        if random.random() < 0.5:
            jobs[place].send_signal(signal.SIGSTOP)
            time.sleep(random.uniform(0, 0.8))
            jobs[place].send_signal(signal.SIGCONT)
        else:
            jobs[place].kill()
            jobs[place].wait()
            killed += 1
            jobs[place] = start(f"again{killed}")
    assert [job.wait(60) for job in jobs] == [0] * len(jobs)
    assert killed
    noted = [int(line) for line in (tmp_path / "shared" / "log").read_text().split()]
    assert len(set(noted)) == len(noted) >= pieces - killed
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert names == {"log", *(f"piece{n}" for n in range(pieces))}


def test_long_leases_are_renewed(tmp_path: Path) -> None:
    """The duration may be longer than a thread can wait: the renewal must not end by an error."""
    with Leases(tmp_path, 1e30) as leases:
        leases.claim("x")
        leases._renewal.join(0.1)
        assert leases._renewal.is_alive()
