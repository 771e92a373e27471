"""Work in a folder that several jobs share: each piece is claimed by a lease, and what a dead job had is taken over.

<folder>/.lease-NAME/ID/    who has the lease NAME: one job, since a directory is renamed to .lease-NAME only where
                            there is none, or an empty one
           owner.json       its host and process; it is touched as long as that process is alive
           ...              what the job writes there until it is whole, and then publishes by a rename

A lease that nobody has touched for some time is taken over: ID is renamed away. Nothing can be renamed out of it any
more under its old name, so a job that was only asleep publishes nothing, and no piece ever has two writers. Times are
those of the shared disk, of files touched there: no host's clock counts. For a process of this host that is gone nobody
waits. A lease needs nothing of the disk but renames that are atomic.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.lockfile import is_gone, this_process
from jaxret.storage import naming

BOUND = 300.0  # seconds, unless asked for: NFS may show a file's time of change a minute late
_BEATS = 10  # touches in that time
_OWNER = "owner.json"
_GONE = (errno.ENOENT, errno.ESTALE)  # of a directory that another job renamed; ESTALE: on NFS


@dataclass(frozen=True)
class Lease:
    """What a job has claimed; `work` is where it writes (`storage.atomic_write`)."""

    work: Path

    @property
    def held(self) -> bool:
        """Whether no other job has taken it over."""
        try:
            os.close(os.open(self.work, os.O_RDONLY | os.O_DIRECTORY))  # opened: NFS asks the server then
        except OSError as error:
            if error.errno not in (*_GONE, errno.ENOTDIR):
                raise
            return False
        return True

    def publishes(self, write: Callable[[], object]) -> bool:
        """Calls `write`, which publishes files out of `work`; False if the lease was lost, which must not be told as
        an error."""
        try:
            if self.held:
                write()
                return True
        except OSError as error:
            if error.errno not in _GONE or self.held:
                raise
        return False


class Leases:
    """The leases of this job in a folder, which are given back when the block ends. bound: seconds after which one that
    was not touched is another's, as its owner says: jobs need not have the same."""

    def __init__(self, folder: Path, bound: float = BOUND) -> None:
        self.folder, self.bound = Path(folder), float(bound)
        self._owner = {**this_process(), "numbers": _numbers(), "bound": self.bound}
        self._held: list[Lease] = []
        self._spare: Path | None = None  # .lease.ID: a directory to be renamed
        self._time, self._looked = 0.0, -math.inf  # the shared disk's, and when it was asked for
        self._begun = self._made = False  # the folder is there; by this job
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._heart.join()
        for lease in list(self._held):
            self.release(lease)
        if self._spare:
            shutil.rmtree(self._spare, ignore_errors=True)
        if self._made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # nothing was written: a job that failed at once leaves nothing behind

    def claim(self, name: str) -> Lease | None:
        """The lease, or None while another job has it. Raises StorageError if the folder cannot be written."""
        with naming(self.folder):
            try:
                return self._claim(name, self.folder / f".lease-{name}")
            except OSError as error:
                if error.errno not in _GONE or not self.folder.is_dir():
                    raise
                self._spare = None  # who completed the folder has cleared it away
                return None

    def _claim(self, name: str, place: Path) -> Lease | None:
        if owner := _owner(place):
            told = self._why_free(owner)
            if not told:
                return None
            print(f"{self.folder}: {name} was claimed by {told}: taken over", file=sys.stderr)
            self._bury(owner.parent)
        spare = self._prepared()
        try:
            os.rename(spare, place)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another job was faster
                return None
            raise
        self._spare = None
        lease = Lease(place / spare.suffix[1:])
        self._held.append(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Gives a lease back, and what was left in it. If that fails it is taken over later, and what went wrong before
        is what must be told."""
        self._held.remove(lease)
        with contextlib.suppress(OSError):
            self._bury(lease.work)
            lease.work.parent.rmdir()  # fails where another job has it by now

    def free(self, name: str) -> bool:
        """Whether nobody has the lease, or a job that died: `claim` may still find another one faster."""
        with naming(self.folder):
            try:
                owner = _owner(self.folder / f".lease-{name}")
                return owner is None or bool(self._why_free(owner))
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return True  # given back just now

    def holder(self, name: str) -> str:
        """Who has a lease, for a person to read."""
        with contextlib.suppress(OSError):
            if owner := _owner(self.folder / f".lease-{name}"):
                return _who(_parsed(owner.read_text()))
        return "nobody any more"

    def others(self) -> bool:
        """Whether other jobs have leases; also some that died."""
        return bool(set(self.folder.glob(".lease-*")) - {lease.work.parent for lease in self._held})

    def clear(self) -> None:
        """Removes what jobs left that were killed, when all work is done: one that is alive has nothing to lose."""
        own = {lease.work.parent for lease in self._held} | {self._spare}
        for path in set(self.folder.glob(".lease[-.]*")) - own:
            shutil.rmtree(path, ignore_errors=True)

    def _prepared(self) -> Path:
        if not self._spare or not self._spare.is_dir():
            token = secrets.token_hex(8)
            if not self._begun:  # one that vanishes later is not made again: that is an error
                self._made = not self.folder.exists()
                self.folder.mkdir(parents=True, exist_ok=True)
                self._begun = True
            spare = self.folder / f".lease.{token}"
            spare.mkdir()
            try:
                (spare / token).mkdir()
                (spare / token / _OWNER).write_text(json.dumps(self._owner))
            except BaseException:  # a full disk takes a directory and nothing in it
                shutil.rmtree(spare, ignore_errors=True)
                raise
            self._spare = spare
        return self._spare

    def _bury(self, work: Path) -> None:
        """Takes a directory away, at once, and then empties it."""
        grave = self.folder / f".lease.{secrets.token_hex(8)}"
        try:
            os.rename(work, grave)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        shutil.rmtree(grave, ignore_errors=True)  # who completes the folder clears it of the rest

    def _why_free(self, owner: Path) -> str:
        """Whose lease may be taken over, and why; "" if it may not."""
        found: dict[str, Any] = {}
        try:
            with open(owner) as file:  # opened, NFS looks at the file's time again
                touched, found = os.fstat(file.fileno()).st_mtime, _parsed(file.read())
        except OSError as error:
            if error.errno not in _GONE:
                raise
            touched = owner.parent.stat().st_mtime  # gone as well: it is given back
        who = _who(found)
        if found.get("numbers") == self._owner["numbers"] and is_gone(found):
            return f"{who}, which is gone"
        silent = self._now() - touched
        # Where the disk's clock was set back, nobody alive has a time that far ahead for long.
        bound = found["bound"] if isinstance(found.get("bound"), float) else self.bound
        return f"{who}, silent for {abs(silent):.0f} s" if abs(silent) > bound else ""

    def _now(self) -> float:
        """The shared disk's time: that of a file touched now, or not long ago: then nobody seems more silent than he
        is."""
        if time.monotonic() > self._looked + self.bound / _BEATS:
            spare = self._prepared()
            file = spare / spare.suffix[1:] / _OWNER
            os.utime(file)
            self._time, self._looked = file.stat().st_mtime, time.monotonic()
        return self._time

    def _beat(self) -> None:
        while not self._ended.wait(self.bound / _BEATS):
            for lease in list(self._held):
                with contextlib.suppress(OSError):  # lost: that is seen where something is published
                    os.utime(lease.work / _OWNER)


def _owner(place: Path) -> Path | None:
    """The file of who has a lease; None if nobody has."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return next((path / _OWNER for path in place.iterdir()), None)
    return None


def _who(found: dict[str, Any]) -> str:
    return f"process {found.get('process', '?')} on {found.get('host', 'an unknown host')}"


def _numbers() -> str:
    """Among which processes a number means one: hosts may share a name, and containers have numbers of their own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a system without
        return ""


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
