"""One job writes to a folder at a time. Who only reads needs no lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from jaxret.distributed import from_first_process, wait_for_all
from jaxret.storage import naming, sweep

_NAME = ".lock"
_PATIENCE = 2.0  # seconds for another process between making its lock file and writing its name into it


class LockedError(ValueError):
    """Another job writes to the folder; the text says which, where and since when."""


@contextlib.contextmanager
def hold(folder: Path, job: str) -> Iterator[None]:
    """Holds `<folder>/.lock` for the block, and sweeps away what killed writers left in the folder.

    The lock of a process of this host that is gone is taken over, with a line on stderr; that of another host never
    is. The processes of one jax.distributed job are one owner: process 0 holds the lock, so all of them must come here,
    in the same order, and those that succeed leave together. Raises LockedError (in every process) if another job holds
    it, and StorageError if the folder cannot be written.
    """
    folder = Path(folder)
    lock, problem, made = None, None, not folder.exists()
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _Lock(folder / _NAME, job)
            sweep(folder)
        except (LockedError, OSError) as error:
            problem = error
    told = from_first_process(str(problem or ""))
    if told:
        raise problem or LockedError(told)
    try:
        yield
        wait_for_all()  # another process may still write
    finally:
        if lock:
            lock.release()
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing was written: a job that failed at once leaves nothing behind


def locked(folder: Path) -> bool:
    """Whether a job writes to the folder, or was killed while it did."""
    return (folder / _NAME).exists()


class _Lock:
    """A file made by one process only, that names it. An flock on it is what is fought for on a local disk: the kernel
    gives it back when a process dies, so of two that find a dead owner's file one wins. A shared disk may not know
    flock between hosts; there, that only one process can make the file must do, and no other host's is taken over."""

    def __init__(self, path: Path, job: str) -> None:
        pid = os.getpid()
        self.path, self.made = path, False
        self.owner = {
            "host": socket.gethostname(),
            "process": pid,
            "started": _started(pid),
            "job": job,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "id": secrets.token_hex(8),
        }
        patience = time.monotonic() + _PATIENCE
        with naming(path):
            while not self._take(time.monotonic() > patience):
                time.sleep(0.01)

    def _take(self, last: bool) -> bool:
        """Whether the lock is ours now; if not and nobody says why, it is worth another try unless it is the last."""
        descriptor = self._open()
        if descriptor is None:
            return False
        try:
            flocked = _flock(descriptor)
            if not self._is_at_path(descriptor):
                return False  # its owner went away in between
            found = _read(descriptor)
            gone = self._is_gone(found)
            if flocked is not False and (gone or (not found and (self.made or last))):
                if gone and flocked is None:  # nothing decides between two that both find it so
                    raise LockedError(f"{_sentence(found, self.path)}; that process is gone: remove {self.path}")
                if found:
                    print(f"{_sentence(found, self.path)}; that process is gone: taken over", file=sys.stderr)
                # One write of one block, so a kill leaves the old owner or the new one.
                os.pwrite(descriptor, json.dumps(self.owner).encode().ljust(512), 0)
                self.descriptor, descriptor = descriptor, None
                return True
            if found and (last or not gone):
                raise LockedError(self._refusal(found))
            if last:
                raise LockedError(f"{self.path} is held by a process that does not say its name")
            return False
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        """The file's descriptor; None if it went away."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o664)
            self.made = True
            return descriptor
        except FileExistsError:
            pass
        try:
            return os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return None
        except PermissionError:  # another user's
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                raise LockedError(self._refusal(_read(descriptor))) from None
            finally:
                os.close(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        return False

    def _is_gone(self, found: dict[str, Any]) -> bool:
        """Whether the owner was a process of this host that runs no more; its number may be another's by now."""
        if not found or found["host"] != self.owner["host"]:
            return False
        return _started(found["process"]) != found["started"]

    def _refusal(self, found: dict[str, Any]) -> str:
        sentence = _sentence(found, self.path)
        if found.get("host") == self.owner["host"]:
            return f"{sentence}; wait for it, or stop it"
        return f"{sentence}; wait for it, or, if it does not run any more, remove {self.path}"

    def release(self) -> None:
        if os.getpid() != self.owner["process"]:
            return  # a fork's copy
        with contextlib.suppress(OSError):  # the folder was taken away; that is told elsewhere
            if self._is_at_path(self.descriptor):
                self.path.unlink()
        os.close(self.descriptor)


def _started(pid: int) -> str:
    """What tells a process from another that has its number later; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"  # clock ticks since the host was started
    except OSError:
        pass
    if sys.platform == "linux":
        return ""
    try:  # a system without /proc: only whether it is there
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"


def _flock(descriptor: int) -> bool | None:
    """Whether the file's flock is ours; None where the disk has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(descriptor: int) -> dict[str, Any]:
    """The owner that a lock file names; {} for an empty one. Other contents are an owner nobody knows."""
    text = os.pread(descriptor, 4096, 0)
    if not text.strip():
        return {}
    unknown = {"host": "an unknown host", "process": 0, "started": "", "job": "a job", "since": "an unknown time"}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return unknown
    same = isinstance(found, dict) and all(isinstance(found.get(k), type(v)) for k, v in unknown.items())
    return found if same else unknown


def _sentence(found: dict[str, Any], path: Path) -> str:
    who = f"{found['job']}, process {found['process']} on {found['host']}, since {found['since']}"
    return f"{path.parent} is in use: {who}"
