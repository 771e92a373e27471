"""Names of unfinished files and folders, and their removal after their writers were killed.

A file or folder NAME is written as `.NAME.<24 hex digits>.tmp` in the same folder, and renamed at the end. The digits
are 8 for the machine, 8 for the process, and 8 random ones. The writer holds an flock, which the kernel releases when
the process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_TEMPORARY = re.compile(r"\.(.+)\.([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{8}\.tmp", re.DOTALL)
_YOUNG = 60.0  # seconds after which a living writer has certainly locked its file
_OLD = 86_400.0  # seconds without a change after which a writer counts as dead, if locks do not work


def temporary_path(path: Path) -> Path:
    """Return a new path in the folder of `path`, with a name that `remove_leftovers` and `sweep` recognize."""
    return path.with_name(f".{path.name}.{_machine()}{os.getpid():08x}{secrets.token_hex(4)}.tmp")


@functools.cache
def _machine() -> str:
    """Return 8 hex digits for this boot of the machine and for the PID namespace; random digits outside of Linux."""
    try:
        process_namespace = f"{os.stat('/proc/self/ns/pid').st_ino}"
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return secrets.token_hex(4)
    return hashlib.sha256(f"{boot_id} {process_namespace}".encode()).hexdigest()[:8]


def _writer_is_gone(match: re.Match[str]) -> bool:
    """Return whether the process in a temporary name ran on this machine and has ended."""
    return match[2] == _machine() and not os.path.exists(f"/proc/{int(match[3], 16)}")


def is_temporary(name: str) -> bool:
    """Return whether `temporary_path` makes names of this form."""
    return bool(_TEMPORARY.fullmatch(name))


def lock(descriptor: int) -> None:
    """Take the flock of an open unfinished file or folder, if the disk supports flocks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the flock of a folder during the block, if the disk supports flocks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def sweep(path: Path) -> list[str]:
    """Remove the files that killed writers of `path` left next to it, and return their names.

    Files that a living process writes are kept: they are locked, or were changed within a minute. The files of
    processes of this machine that have ended are removed at once. No lock on the folder is needed.
    """
    removed_names, oldest_time = [], time.time() - _YOUNG
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path.parent) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if not match or match[1] != path.name or entry.is_symlink():
                continue
            # Machines that were copied while they ran have the same digits, so the lock is checked in every case.
            if _is_abandoned(Path(entry.path), math.inf if _writer_is_gone(match) else oldest_time):
                _remove(Path(entry.path))
                removed_names.append(entry.name)
    return sorted(removed_names)


def remove_leftovers(folder: str | os.PathLike[str], age: int = 0) -> list[str]:
    """Remove temporary files that killed writers left in `folder`, and return their names.

    Files in subfolders and temporary folders are not removed. Call it with the folder's lock held, before other
    processes of the job write there. Without a lock, set `age`: only files that were not modified for this number of
    seconds, longer than any write takes, are removed.
    """
    oldest_time = time.time() - age
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        files = [entry for entry in entries if is_temporary(entry.name) and entry.is_file(follow_symlinks=False)]
        leftovers = [entry for entry in files if not age or entry.stat(follow_symlinks=False).st_mtime < oldest_time]
        for entry in leftovers:
            Path(entry.path).unlink(missing_ok=True)
        return sorted(entry.name for entry in leftovers)
    return []


def _is_abandoned(path: Path, oldest_time: float) -> bool:
    try:
        mtime = path.stat().st_mtime
        if mtime >= oldest_time:
            return False
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # the file was removed, or belongs to another user
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:  # the writer of the file is alive
        return False
    except OSError:  # the disk does not support flocks
        pass
    finally:
        os.close(descriptor)
    newest = max((entry.stat().st_mtime for entry in path.rglob("*")), default=mtime)
    return max(newest, mtime) < time.time() - _OLD


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
