"""The user's cache of compiled programs, files of buckets, and tokenized texts, with limits of the sizes.

A tokenized text is a folder, any other entry a file. An entry may be deleted at any time, because it is created
again when needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxret.storage.atomic import cache_folder

CACHE_KINDS = {"compiled": "compiled programs", "tokens": "tokenized texts", "objects": "files of buckets"}
VARIABLES = {"tokens": "JAXRET_TOKENS_GB", "objects": "JAXRET_OBJECTS_GB"}  # variables that set limits, in 10^9 bytes
# Limits in bytes. The limit of "objects" is half of the disk space that would be free without them.
_LIMITS = {"compiled": 2 << 30, "tokens": 32 * 10**9}
# Seconds after its last use in which an entry is not deleted: another process may be reading or making it.
_IN_USE = {"compiled": 0.0, "tokens": 86400.0, "objects": 0.0}


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache; `last_use` is a time in seconds since 1970."""

    path: Path
    size: int
    last_use: float

    def delete(self) -> None:
        """Delete the entry, even if another process deletes it at the same time."""
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


def cache_limit(kind: str) -> int:
    """Return the limit of a kind in bytes. Raises ValueError for an environment variable that is not a number."""
    variable = VARIABLES.get(kind, "")
    if value := os.environ.get(variable):
        try:
            limit = int(float(value) * 1e9)
        except (ValueError, OverflowError):
            limit = -1
        if limit < 0:
            raise ValueError(f"{variable}={value}: it must be a number of gigabytes, such as 32")
        return limit
    if kind in _LIMITS:
        return _LIMITS[kind]
    folder = cache_folder(kind)
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    return (shutil.disk_usage(parent).free + sum(entry.size for entry in cache_entries(folder))) // 2


def cache_entries(folder: Path) -> list[CacheEntry]:
    """Return the entries of a folder, the least recently used first, without leases and locks (names with a dot)."""
    entries = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as children:
        for entry in children:
            if not entry.name.startswith(".") and not entry.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_entry(Path(entry.path)))
    return sorted(entries, key=lambda entry: entry.last_use)


def _entry(path: Path) -> CacheEntry:
    status = path.stat()
    if not path.is_dir():
        return CacheEntry(path, status.st_size, max(status.st_atime, status.st_mtime))
    return CacheEntry(path, sum(_sizes(path)), status.st_mtime)


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_size


def mark_used(folder: Path) -> None:
    """Record the use of a folder of the cache, if it can be written."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def trim_cache(folder: Path, kind: str, protected_paths: Collection[Path] = ()) -> list[CacheEntry]:
    """Delete the least recently used entries until the remaining ones are within the limit of their kind. Return the
    deleted entries.

    The paths in `protected_paths` are not deleted.
    """
    entries, deletions, seconds = cache_entries(folder), [], time.time()
    total, limit = sum(entry.size for entry in entries), cache_limit(kind)
    for entry in entries:
        if total <= limit:
            break
        if seconds - entry.last_use >= _IN_USE[kind] and entry.path not in protected_paths:
            entry.delete()
            deletions.append(entry)
            total -= entry.size
    return deletions


def clear_cache(kind: str) -> list[CacheEntry]:
    """Delete all entries of a kind that no process is making. Return the deleted entries."""
    folder = cache_folder(kind)
    deletions = [entry for entry in cache_entries(folder) if not any((folder / f".lease-{entry.path.name}").glob("*"))]
    for entry in deletions:
        entry.delete()
    return deletions
