"""Leases on pieces of work in a folder of a bucket, and the exchange of finished files between working copies.

<address>/leases/FOLDER/NAME.json   the holder of the lease NAME, who changes the object while it is alive; changed by
                                    replace-if-unchanged
<address>/groups/FOLDER/NAME.json   the files that were written under the lease, created if absent (`bucket_folder`)

A lease only saves work: if two jobs hold one, they write different objects, and the first group that is added is used.
A lease that has not changed for the time of its bound is taken over. Each job measures this time with its own monotonic
clock, so no clocks of two hosts are compared, and a new job waits one bound for a dead host. A holder on this host
loses its lease as soon as its process has ended.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.storage.buckets.bucket import BucketError, BucketObject, salted_json
from jaxret.storage.buckets.working_copy import WorkingCopy, copy_of
from jaxret.storage.leases import BOUND, Lease, Leases, describe_owner, is_gone, parse_record

_PAUSE = 0.5  # seconds between two reads of the bucket
_LEAST_BEAT = 1.0  # seconds: GCS takes one change of an object per second
LAST = "manifest"  # the lease of the job that adds all written files to the folder


def open_leases(folder: Path, bound: float = BOUND) -> Leases:
    """Return the leases of this job in a folder; if the folder is in a working copy, leases in the bucket."""
    copy = copy_of(folder)
    return BucketLeases(copy, folder, bound) if copy else Leases(folder, bound)


@dataclass(frozen=True)
class BucketLease(Lease):
    """A claimed lease whose files are uploaded to the bucket when they are published."""

    name: str
    leases: BucketLeases

    def publish(self, write: Callable[[], object]) -> bool:
        """Call `write`, and publish the files that it writes; return False if another job has published them before."""
        return self.leases.publish(self, write)


class BucketLeases(Leases):
    """The leases of this job in a folder of a working copy; see `Leases`.

    Args:
        copy: the working copy.
        folder: a folder in the working copy.
        bound: seconds after which an unchanged lease of this job may be taken over.
    """

    def __init__(self, copy: WorkingCopy, folder: Path, bound: float = BOUND) -> None:
        super().__init__(folder, bound)
        self._copy, self._bucket = copy, copy.folder.bucket
        names = folder.absolute().relative_to(copy.path).as_posix()
        self._names = "" if names == "." else names  # prefix of the names of files in the folder
        self._versions: dict[str, bytes] = {}  # versions of the leases that this job holds
        # Leases of other jobs: the version, and the monotonic time when this job first saw it.
        self._sights: dict[str, tuple[bytes, float]] = {}
        self._bucket_names: set[str] = set()  # names of leases in the bucket at the last refresh
        self._refreshed_at = -_PAUSE
        self._mutex = threading.RLock()

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(BucketError):  # an earlier exception is more important
            self._remove_groups_without_files()
        super().__exit__(*exception)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}.json"

    @property
    def _prefix(self) -> str:
        return f"leases/{self._names}".rstrip("/")

    def refresh(self) -> None:
        """Fetch the files that other jobs have finished, and list the leases; at most once in _PAUSE seconds."""
        with self._mutex:
            if time.monotonic() < self._refreshed_at + _PAUSE:
                return
            self._copy.refresh(self._names)
            keys = self._bucket.list(self._prefix)
            self._bucket_names = {key.removeprefix(f"{self._prefix}/").removesuffix(".json") for key in keys}
            self._refreshed_at = time.monotonic()

    def names(self) -> list[str]:
        """Return the names of all leases in the bucket; see `Leases.names`."""
        self.refresh()
        return sorted(self._bucket_names)

    def _claim(self, name: str, path: Path) -> Lease | None:
        with self._mutex:
            self._copy.require_writable()
            current = self._bucket.get(self._key(name))
            if current and not self._may_take(name, current):
                return None
            lease = super()._claim(name, path)
            if not lease:
                return None
            body = salted_json(self._owner)
            key = self._key(name)
            success = self._bucket.replace(key, body, current.version) if current else self._bucket.create(key, body)
            mine = self._bucket.get(key) if success else None
            if mine is None or mine.body != body:  # another job has claimed it first
                super().release(lease)
                return None
            if current and (owner := _owner_of(current)):
                print(
                    f"{self._copy.address}/{self._names}: {name} was claimed by {describe_owner(owner)}: taken over",
                    file=sys.stderr,
                )
            self._versions[name] = mine.version
            self._leases.remove(lease)
            lease = BucketLease(lease.work, name, self)
            self._leases.append(lease)
            return lease

    def _may_take(self, name: str, current: BucketObject) -> bool:
        owner = _owner_of(current)
        if not owner or (owner.get("numbers") == self._owner["numbers"] and is_gone(owner)):
            return True
        version, since = self._sights.get(name, (b"", 0.0))
        if version != current.version:
            self._sights[name] = current.version, time.monotonic()
            return False
        bound = owner["bound"] if isinstance(owner.get("bound"), float) else self.bound
        return time.monotonic() - since > max(bound, 2 * _LEAST_BEAT)

    def release(self, lease: Lease) -> None:
        with self._mutex:
            if isinstance(lease, BucketLease) and (version := self._versions.pop(lease.name, None)):
                with contextlib.suppress(BucketError):
                    self._bucket.replace(self._key(lease.name), salted_json({}), version)
            super().release(lease)

    def is_free(self, name: str) -> bool:
        self.refresh()
        with self._mutex:
            if name in self._versions:
                return False
            if name not in self._bucket_names:
                return True
            current = self._bucket.get(self._key(name))
            return current is None or self._may_take(name, current)

    def holder(self, name: str) -> str:
        current = self._bucket.get(self._key(name))
        owner = _owner_of(current) if current else {}
        return describe_owner(owner) if owner else "nobody any more"

    def others_exist(self) -> bool:
        keys = [key for key in self._bucket.list(self._prefix) if key not in map(self._key, self._versions)]
        return any(current and _owner_of(current) for current in self._bucket.get_several(keys))

    def clear(self) -> None:
        """Remove all leases, including this job's; a later `release` does not write them again."""
        self._bucket.delete(self._bucket.list(self._prefix))
        self._copy.folder.sweep_groups(self._names)
        super().clear()

    def publish(self, lease: BucketLease, write: Callable[[], object]) -> bool:
        """Call `write`, and publish the files that it changes in the folder; see `BucketLease.publish`."""
        with self._mutex:
            write()
            if lease.name == LAST:
                self._copy.publish_folder(self._names)
                return True
            return self._copy.publish_group(self._names, f"{self._names}/{lease.name}".lstrip("/"))

    def _remove_groups_without_files(self) -> None:
        """Remove the groups whose files this job has removed from its working copy, as after an error."""
        names = [
            group
            for group, files in self._copy.folder.groups(self._names).items()
            if not any((self._copy.path / name).exists() for name in files) and self._copy.has_seen(files)
        ]
        self._copy.folder.remove_groups(names)

    def _renew(self) -> None:
        while not self._end.wait(min(max(self.bound / 10, _LEAST_BEAT), threading.TIMEOUT_MAX)):
            for name in list(self._versions):
                with self._mutex, contextlib.suppress(BucketError):  # a lost lease costs only work
                    if version := self._versions.get(name):
                        body = salted_json(self._owner)
                        if self._bucket.replace(self._key(name), body, version):
                            current = self._bucket.get(self._key(name))
                            if current and current.body == body:
                                self._versions[name] = current.version
                                continue
                        del self._versions[name]


def _owner_of(current: BucketObject) -> dict[str, Any]:
    """Return the holder of a lease; empty if it was released."""
    owner = parse_record(current.body)
    return owner if "process" in owner else {}
