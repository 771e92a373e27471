"""A file that says who works in a folder, so that nobody else does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxret.storage import naming

LOCK = ".lock"  # its name in the folder
_PATIENCE = 2.0  # seconds for another process between making its lock file and writing its name into it


class LockedError(ValueError):
    """Another job writes to the folder; the text says which, where and since when."""


class LockFile:
    """A file made by one process only, that names it, until `release()`. LockedError: another process has it. That of
    a process of this host that is gone is taken over, with a line on stderr.

    An flock on it is what is fought for on a local disk: the kernel gives it back when a process dies, so of two that
    find a dead owner's file one wins. A shared disk may not know flock between hosts; there, that only one process can
    make the file must do, and no other host's is taken over."""

    def __init__(self, path: Path, job: str) -> None:
        self.path, self.made = path, False
        self.owner = {
            **this_process(),
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
            gone = is_gone(found)
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


def this_process() -> dict[str, Any]:
    """What tells this process from any other, on any host, at any time."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "process": pid, "started": _started(pid)}


def is_gone(found: Mapping[str, Any]) -> bool:
    """Whether `this_process` was written by a process of this host that runs no more; its number may be another's by
    now."""
    if found.get("host") != socket.gethostname() or type(found.get("process")) is not int:
        return False
    return _started(found["process"]) != found.get("started")


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
