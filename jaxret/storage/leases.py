"""Leases on pieces of work in a folder that several jobs share; the work of a dead job is taken over.

<folder>/.lease-NAME/ID/    one job holds the lease NAME: a directory can be renamed to .lease-NAME only if .lease-NAME
                            does not exist or is empty
           owner.json       host and process of the holder, which touches the file while it is alive
           ...              unfinished files of the holder, which publishes them by a rename

A lease that was not touched for some time is taken over by renaming ID. Then the old holder cannot rename files out of
ID any more, so a job that was only asleep publishes nothing, and no piece of work has two writers. Times are
modification times of files on the shared disk, so no host's clock is used. A holder on this host loses its lease as
soon as its process has ended. The disk only has to support atomic renames.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.storage.atomic import storage_errors, sync, write_json

BOUND = 300.0  # default bound of a lease in seconds: NFS may show a file's modification time a minute late
_BEATS = 10  # touches of a lease during its bound
_OWNER = "owner.json"
_UNFINISHED = ".unfinished"  # suffix of directories that a job prepares or deletes; they can be removed
_PAUSE = 0.1  # seconds between two reads of a file that another job publishes
_GONE = (errno.ENOENT, errno.ESTALE)  # error numbers if another job has renamed a directory; ESTALE on NFS


@dataclass(frozen=True)
class Lease:
    """A claimed lease; the job writes unfinished files to `work` (`storage.atomic_write`)."""

    work: Path

    @property
    def is_held(self) -> bool:
        """Return whether this job still has the lease: no other job has taken it over."""
        try:
            os.close(os.open(self.work, os.O_RDONLY | os.O_DIRECTORY))  # opening makes NFS ask the server
        except OSError as error:
            if error.errno not in (*_GONE, errno.ENOTDIR):
                raise
            return False
        return True

    def publish(self, write: Callable[[], object]) -> bool:
        """Call `write`, which publishes files out of `work`. Return False if the lease was lost.

        A lost lease is not an error: errors of `write` that follow from it are suppressed.
        """
        try:
            if self.is_held:
                write()
                return True
        except OSError as error:
            if error.errno not in _GONE or self.is_held:
                raise
        return False


class Leases:
    """The leases of this job in a folder. At the end of the block they are released, and leases of dead jobs removed.

    `bound` is the time in seconds after which an untouched lease of this job may be taken over. It is stored in
    owner.json, so jobs may have different bounds.
    """

    def __init__(self, folder: Path, bound: float = BOUND) -> None:
        self.folder, self.bound = Path(folder), float(bound)
        self._owner = {**this_process(), "numbers": _numbers(), "bound": self.bound}
        self._leases: list[Lease] = []
        self._explanations: set[Path] = set()  # owner files of leases for which this job has printed that it waits
        self._spare: Path | None = None  # .lease.ID: prepared directory, which is renamed on a claim
        self._time, self._time_of_look = 0.0, -math.inf  # time of the shared disk, and monotonic time when it was read
        self._exists = self._has_made_folder = False  # whether the folder exists; whether this job created it
        self._end = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        self._renewal.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._renewal.join()
        for lease in list(self._leases):
            self.release(lease)
        with contextlib.suppress(OSError):  # leftovers are harmless, and an earlier exception is more important
            self._remove_abandoned()
        if self._spare:
            shutil.rmtree(self._spare, ignore_errors=True)
        if self._has_made_folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # succeeds only if it is empty, so that a job that failed at once leaves no folder

    def refresh(self) -> None:
        """Fetch the files that other jobs have finished; on a shared disk they are visible at once."""

    def names(self) -> list[str]:
        """Return the names of all leases in the folder, including those of dead jobs."""
        return [path.name.removeprefix(".lease-") for path in self.folder.glob(".lease-*")]

    def claim(self, name: str) -> Lease | None:
        """Return the lease, or None if another job has it. Raises StorageError if the folder cannot be written."""
        with storage_errors(self.folder):
            try:
                return self._claim(name, self.folder / f".lease-{name}")
            except OSError as error:
                if error.errno not in _GONE or not self.folder.is_dir():
                    raise
                self._spare = None  # the job that completed the folder may have removed it
                return None

    def _claim(self, name: str, path: Path) -> Lease | None:
        if owner := _owner(path):
            reason = self._why_free(owner)
            if not reason:
                return None
            print(f"{self.folder}: {name} was claimed by {reason}: taken over", file=sys.stderr)
            self._discard(owner.parent)
        spare = self._prepare_spare()
        try:
            os.rename(spare, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another job has claimed it first
                return None
            raise
        self._spare = None
        lease = Lease(path / spare.suffix[1:])
        self._leases.append(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Release a lease, and delete the files in it.

        Errors are suppressed: another job takes the lease over later, and an earlier exception is more important.
        """
        self._leases.remove(lease)
        with contextlib.suppress(OSError):
            self._discard(lease.work)
            lease.work.parent.rmdir()  # fails if another job has claimed it meanwhile

    def publish_once(self, path: Path, value: Any) -> None:
        """Write `value` as JSON to `path` in the folder unless a job has done so; return when the file exists."""
        while not path.exists():
            lease = self.claim(path.stem)
            if lease is None:
                time.sleep(_PAUSE)
                continue
            try:
                if not path.exists():  # another job may have published it before this one had the lease
                    lease.publish(partial(write_json, path, value, lease.work))
            finally:
                self.release(lease)

    def is_free(self, name: str) -> bool:
        """Return whether no living job has the lease. Another job may still claim it first."""
        with storage_errors(self.folder):
            try:
                owner = _owner(self.folder / f".lease-{name}")
                return owner is None or bool(self._why_free(owner))
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return True  # released just now

    def holder(self, name: str) -> str:
        """Return a description of the job that has a lease, for a message."""
        with contextlib.suppress(OSError):
            if owner := _owner(self.folder / f".lease-{name}"):
                return describe_owner(parse_record(owner.read_text()))
        return "nobody any more"

    def others_exist(self) -> bool:
        """Return whether other jobs, including dead ones, have leases."""
        return bool(set(self.folder.glob(".lease-*")) - {lease.work.parent for lease in self._leases})

    def clear(self) -> None:
        """Remove the leases of all other jobs. Call it when all work is done, so that no living job loses work."""
        own_paths = {lease.work.parent for lease in self._leases} | {self._spare}
        for path in set(self.folder.glob(".lease[-.]*")) - own_paths:
            shutil.rmtree(path, ignore_errors=True)

    def _remove_abandoned(self) -> None:
        """Remove leases and unfinished directories of dead jobs.

        If an unfinished directory belongs to a living job, that job prepares another one.
        """
        for path in self.folder.glob(f".lease.*{_UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in set(self.folder.glob(".lease[-.]*")) - {self._spare}:
            if (owner := _owner(path)) and self._why_free(owner):
                self._discard(owner.parent)
                with contextlib.suppress(OSError):
                    path.rmdir()  # fails if another job has claimed it meanwhile

    def _prepare_spare(self) -> Path:
        if not self._spare or not self._spare.is_dir():
            token = secrets.token_hex(8)
            if not self._exists:  # made only once: if the folder vanishes later, that is an error
                self._has_made_folder = not self.folder.exists()
                self.folder.mkdir(parents=True, exist_ok=True)
                self._exists = True
            spare = self.folder / f".lease.{token}"
            draft = spare.with_name(spare.name + _UNFINISHED)
            draft.mkdir()
            try:
                (draft / token).mkdir()
                (draft / token / _OWNER).write_text(json.dumps(self._owner))
                sync(draft / token / _OWNER)  # after a power cut, an empty file would make other jobs wait
                draft.rename(spare)
            except BaseException:  # a full disk may accept a directory but no file
                shutil.rmtree(draft, ignore_errors=True)
                raise
            self._spare = spare
        return self._spare

    def _discard(self, work: Path) -> None:
        """Delete a directory after an atomic rename."""
        grave = self.folder / f".lease.{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            os.rename(work, grave)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        shutil.rmtree(grave, ignore_errors=True)  # the next job deletes what remains

    def _why_free(self, owner: Path) -> str:
        """Return the holder of a lease, and the reason why it may be taken over; "" if it may not."""
        owner_record: dict[str, Any] = {}
        try:
            with open(owner) as file:  # opening makes NFS read the file's time again
                last_touch, owner_record = os.fstat(file.fileno()).st_mtime, parse_record(file.read())
        except OSError as error:
            if error.errno not in _GONE:
                raise
            last_touch = owner.parent.stat().st_mtime  # raises if the lease was released
        holder = describe_owner(owner_record)
        if owner_record.get("numbers") == self._owner["numbers"] and is_gone(owner_record):
            return f"{holder}, which is gone"
        silent = self._disk_time() - last_touch
        # abs, because after the disk's clock was set back, a time far in the future belongs to a job that no longer
        # touches it.
        bound = owner_record["bound"] if isinstance(owner_record.get("bound"), float) else self.bound
        if abs(silent) > bound:
            return f"{holder}, silent for {abs(silent):.0f} s"
        if owner not in self._explanations and (not owner_record or abs(silent) > 2 * bound / _BEATS):
            self._explanations.add(owner)
            cause = f"silent for {abs(silent):.0f} s" if owner_record else f"{owner} is lost or damaged"
            name = owner.parent.parent.name.removeprefix(".lease-")
            print(
                f"{self.folder}: {name} is with {holder} ({cause}); it is taken over after {bound:.0f} s without a "
                "change, because that job may be running on another host",
                file=sys.stderr,
            )
        return ""

    def _disk_time(self) -> float:
        """Return the shared disk's time: the modification time of a file touched now or recently.

        The time of a recent touch is earlier than the true time, so no job seems silent for longer than it is.
        """
        if time.monotonic() > self._time_of_look + self.bound / _BEATS:
            spare = self._prepare_spare()
            file = spare / spare.suffix[1:] / _OWNER
            os.utime(file)
            self._time, self._time_of_look = file.stat().st_mtime, time.monotonic()
        return self._time

    def _renew(self) -> None:
        while not self._end.wait(min(self.bound / _BEATS, threading.TIMEOUT_MAX)):
            for lease in list(self._leases):
                with contextlib.suppress(OSError):  # a lost lease is detected when files are published
                    os.utime(lease.work / _OWNER)


def this_process() -> dict[str, Any]:
    """Return host, process id and start time, which together identify this process."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "process": pid, "started": _process_start(pid)}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Return whether a process of this host has ended. `process` is a result of `this_process`: its start time shows
    whether a later process has the same process id.
    """
    if process.get("host") != socket.gethostname() or type(process.get("process")) is not int:
        return False
    return _process_start(process["process"]) != process.get("started")


def _process_start(pid: int) -> str:
    """Return boot and start time of a process, which differ from those of a later process with its id; "" if none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"  # clock ticks since the host was started
    except OSError:
        pass
    if sys.platform == "linux":
        return ""
    try:  # without /proc, this only shows whether the process exists
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"


def _owner(path: Path) -> Path | None:
    """Return the owner file of a lease; None if no job has it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return next((folder / _OWNER for folder in path.iterdir()), None)
    return None


def describe_owner(owner: dict[str, Any]) -> str:
    """Return the process and host of a lease's owner, for messages."""
    return f"process {owner.get('process', '?')} on {owner.get('host', 'an unknown host')}"


def _numbers() -> str:
    """Return an id of the host's boot and PID namespace: host names and process ids may be ambiguous."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a system without /proc
        return ""


def parse_record(text: str | bytes) -> dict[str, Any]:
    """Return the record of a lease's owner; {} if it is lost or damaged."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
