"""A cache of bucket files on this host's disk by digest: the processes of a host download each file once."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from jaxret.storage.atomic import atomic_write, cache_folder, storage_errors
from jaxret.storage.buckets.bucket import BucketError
from jaxret.storage.cache import cache_limit, trim_cache
from jaxret.storage.unfinished import temporary_path

_LINKED = 1 << 20  # a file of at least this size is linked instead of copied; programs may append to smaller files
_APPENDED = (".jsonl",)  # suffixes of files that are always copied, because programs append to them
_ATTEMPTS = 4  # attempts to take a file from the cache, because other threads and processes may trim it
_SHARE = 16  # a process lists the cache again after it has stored 1 / _SHARE of the limit
_EPOCH, _YEARS = 10**9, 10**8  # modification times of cached files are _EPOCH plus up to _YEARS, in seconds


@dataclass(frozen=True)
class CachedFile:
    """A file of a bucket."""

    name: str  # name in the cache
    sha256: str  # "" if it is not known
    source: str  # address, for messages


def version_name(address: str, version: bytes) -> str:
    """Return the name in the cache of an object that has a version, but no known digest."""
    return sha256(address.encode() + b"\0" + version).hexdigest()


def fetch(file: CachedFile, parts: Callable[[], Iterable[bytes]], path: Path) -> None:
    """Write a file to a path from this host's cache, or from `parts`, which are then stored in the cache.

    A large file is a link to the cached file, and must not be changed, only replaced. If a cached file was changed,
    which its time shows, it is fetched again. Raises BucketError if the bytes do not have the digest, StorageError if
    the disk is full.
    """
    folder = cache_folder("objects")
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    cache_path = folder / file.name
    for _ in range(_ATTEMPTS):
        if not _is_intact(cache_path, file):
            try:
                with FileLock(folder / f".{file.name}.lock", mode=0o664):
                    if not _is_intact(cache_path, file):
                        _store(cache_path, file, parts())
            finally:
                with contextlib.suppress(OSError):
                    (folder / f".{file.name}.lock").unlink()
            _ROOM.make(folder, cache_path)
        with contextlib.suppress(OSError):
            os.utime(cache_path, (time.time(), cache_path.stat().st_mtime))
        with contextlib.suppress(FileNotFoundError):  # another process has just trimmed the cache
            return _copy(cache_path, path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, file, parts())  # not cached: the cache is too small for the files in use


class _Room:
    """A limiter of the cache's size. It lists the cache only after some bytes were stored, and not after each file."""

    def __init__(self) -> None:
        self._lock, self._new_bytes, self._limit = threading.Lock(), 0, -1

    def make(self, folder: Path, cache_path: Path) -> None:
        """Trim the cache if enough was stored since the last time. `cache_path` has just been stored."""
        with self._lock:
            with contextlib.suppress(FileNotFoundError):
                self._new_bytes += cache_path.stat().st_size
            if self._new_bytes <= self._limit:
                return
            trim_cache(folder, "objects", {cache_path})
            self._new_bytes, self._limit = 0, cache_limit("objects") // _SHARE


_ROOM = _Room()


def _time_of(file: CachedFile) -> int:
    """Return the modification time of a file in the cache.

    It is the same on every host and after every fetch, because files that are made from it record this time.
    """
    return _EPOCH + int(file.name[:8], 16) % _YEARS


def _is_intact(cache_path: Path, file: CachedFile) -> bool:
    """Return whether the cache has an unchanged copy of a file."""
    try:
        return int(cache_path.stat().st_mtime) == _time_of(file)
    except FileNotFoundError:
        return False


def _store(cache_path: Path, file: CachedFile, parts: Iterable[bytes]) -> None:
    write_file(cache_path, file, parts)
    with contextlib.suppress(FileNotFoundError):  # another thread has just trimmed the cache
        cache_path.chmod(0o444)
        os.utime(cache_path, (time.time(), _time_of(file)))


def write_file(path: Path, file: CachedFile, parts: Iterable[bytes]) -> None:
    """Write bytes to a path without the cache. Raises BucketError if they do not have the digest."""
    actual = sha256()
    with atomic_write(path, "wb") as target:
        for part in parts:
            actual.update(part)
            target.write(part)
        if file.sha256 and actual.hexdigest() != file.sha256:
            raise BucketError(
                f"{file.source} is damaged in the bucket or on the way: SHA-256 {actual.hexdigest()[:16]}... instead "
                f"of {file.sha256[:16]}... (jaxret verify names all such files)"
            )


def _copy(cache_path: Path, path: Path) -> None:
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        try:
            if cache_path.stat().st_size >= _LINKED and path.suffix not in _APPENDED:
                try:
                    os.link(cache_path, temporary)
                except OSError as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    shutil.copy2(cache_path, temporary)  # the path is on another disk, or the disk has no links
            else:
                shutil.copy2(cache_path, temporary)
                temporary.chmod(0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
