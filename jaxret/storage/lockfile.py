"""A lock on a folder: only one process writes files in it. Other processes can read which process that is."""

from __future__ import annotations

import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jaxret.storage.atomic import read_json, storage_errors, write_json

LOCK, HOLDER = ".lock", ".lock.json"  # in the folder: the locked file, and a record of the process that holds it
_UNKNOWN = {"host": "an unknown host", "process": 0, "job": "a job", "since": "an unknown time"}


class LockedError(ValueError):
    """Another job writes to the folder; the message has its process, host and start."""


class FolderLock:
    """An flock on `<folder>/.lock`, held until `release()`; the kernel releases it when the process dies.

    The record of a killed process of this host is replaced, with a line on stderr. The record of a process on another
    host is not replaced, because a shared disk may not share flocks between hosts. On a disk without flock, filelock
    creates the file exclusively. Raises LockedError if another job holds the lock, StorageError if the folder cannot
    be written.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._folder, self._process = folder, os.getpid()
        self._lock = FileLock(folder / LOCK, timeout=0, mode=0o664, thread_local=False)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with storage_errors(folder / LOCK):
            try:
                self._lock.acquire()
            except Timeout:
                raise LockedError(self._refusal(_read_holder(folder))) from None
            except PermissionError:  # the file belongs to another user
                if holder := _read_holder(folder):
                    raise LockedError(self._refusal(holder)) from None
                raise
            try:
                if holder := _read_holder(folder):
                    if holder["host"] != socket.gethostname():
                        raise LockedError(self._refusal(holder))
                    print(f"{_in_use(folder, holder)}; that process is gone: taken over", file=sys.stderr)
                record = {"host": socket.gethostname(), "process": self._process, "job": job, "since": since}
                write_json(folder / HOLDER, record)
            except BaseException:
                self._lock.release()
                raise

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        sentence = _in_use(self._folder, holder)
        if holder is None or holder["host"] == socket.gethostname():
            return f"{sentence}; wait for it, or stop it"
        files = f"{self._folder / LOCK} and {self._folder / HOLDER}"
        return f"{sentence}; wait for it, or, if it does not run any more, remove {files}"

    def release(self) -> None:
        """Release the lock and remove its files, except in a forked child."""
        if os.getpid() != self._process:
            return
        (self._folder / HOLDER).unlink(missing_ok=True)
        # A SoftFileLock removes its file itself. A process that waits on a removed file tries again.
        if type(self._lock) is FileLock:
            (self._folder / LOCK).unlink(missing_ok=True)
        self._lock.release()


def _read_holder(folder: Path) -> dict[str, Any] | None:
    """Return the record of the lock's holder, with unknown values if it cannot be read; None if there is none."""
    try:
        record = read_json(folder / HOLDER)
    except FileNotFoundError:
        return None
    except ValueError:
        return _UNKNOWN
    valid = isinstance(record, dict) and all(isinstance(record.get(key), type(x)) for key, x in _UNKNOWN.items())
    return record if valid else _UNKNOWN


def _in_use(folder: Path, holder: dict[str, Any] | None) -> str:
    if holder is None:  # the other job has locked the folder, but has not written its record yet
        return f"{folder} is in use by a job that has just begun"
    return (
        f"{folder} is in use: {holder['job']}, process {holder['process']} on {holder['host']}, since {holder['since']}"
    )
