"""Copy a folder between disks and buckets; files that the destination already has are not copied again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxret.storage.atomic import atomic_write, require_disk_path, require_folder_path, sha256_file, storage_errors
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.bucket import BucketError, salted_json
from jaxret.storage.buckets.bucket_folder import COPYING, BucketFolder, StoredFile, is_leftover
from jaxret.storage.buckets.working_copy import fetch_files, folder_files, local_path
from jaxret.storage.file_state import FileState, file_state
from jaxret.storage.folder_kinds import Contents, identifying, require_same_folder, require_same_kind
from jaxret.storage.lockfile import HOLDER, FolderLock

_DAMAGED = b"damaged"  # in place of a first line: only an identical file counts as one of the same source
_BATCH_FILES, _BATCH_BYTES = 64, 256 << 20  # files and bytes that are copied before progress is shown
_PUBLISHED_AFTER = 5.0  # seconds; after a kill, a copy to a bucket sends the files of this time again


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy."""

    source: str
    destination: str
    files: int  # number of files of the source
    bytes: int  # size of these files
    new_files: int  # number of files that the destination did not have


def copy_folder(
    source: str, destination: str, verify: bool = False, show: Callable[[int], None] = lambda size: None
) -> CopyResult:
    """Copy the files of a folder that the destination does not have with the same digest.

    Locks, leases and unfinished files, whose names begin with a dot, are not copied. The files that mark a folder as a
    run are written last, so that an interrupted copy is not a run; the same call continues it. Files of the destination
    that the source does not have are not removed.

    Args:
        source: folder, or address of a folder in a bucket.
        destination: folder, or address of a folder in a bucket.
        verify: whether to read the bytes of files in a destination bucket, and to copy damaged or missing ones again.
            Otherwise the digests in the manifest count. The bytes of a folder on a disk are always read.
        show: called with the size of each finished file.

    Raises:
        FileExistsError: the destination is of another kind than the source, or has files of another source.
        ValueError: the source is not a folder or is in use, or the parent folder of the destination does not exist.
        BucketError: a bucket cannot be read or written, or bytes are damaged.
    """
    for address in (source, destination):
        require_disk_path(address)
    origin = _open_source(source)
    names = origin.names(source)
    last = {name for name in identifying(names) if "/" not in name}
    names.sort(key=lambda name: (name in last, "/" not in name, name))
    if is_bucket_address(destination):
        return _to_bucket(source, BucketFolder(destination), origin, names, verify, show)
    require_folder_path(destination, "DST")
    with storage_errors(destination):
        Path(destination).mkdir(exist_ok=True)
    lock = FolderLock(Path(destination), "a copy")
    try:
        return _to_disk(source, Path(destination), origin, names, show)
    finally:
        lock.release()


def _to_disk(
    source: str, destination: Path, origin: _Side, names: Sequence[str], show: Callable[[int], None]
) -> CopyResult:
    _require_same(origin, names, _Side(destination, None, {}), str(destination))
    new_count, size = 0, 0
    for batch in _batches((name, origin.describe(name)) for name in names):
        missing_files = {name: file for name, file in batch.items() if not _has(destination / name, file)}
        if origin.folder:
            origin.folder.write(missing_files, destination)
        for name, file in missing_files.items():
            if not origin.folder:
                with open(origin.path / name, "rb") as old, atomic_write(destination / name, "wb") as new:
                    shutil.copyfileobj(old, new, 1 << 20)
            if not _has(destination / name, file):
                raise BucketError(f"{destination / name} differs from what {source}/{name} was; copy again")
        for file in batch.values():
            show(file.size)
            size += file.size
        new_count += len(missing_files)
    return CopyResult(source, str(destination), len(names), size, new_count)


def _batches(files: Iterable[tuple[str, StoredFile]]) -> Iterator[dict[str, StoredFile]]:
    """Yield the files in batches, in their order."""
    batch, size = dict[str, StoredFile](), 0
    for name, file in files:
        if batch and (len(batch) == _BATCH_FILES or size + file.size > _BATCH_BYTES):
            yield batch
            batch, size = {}, 0
        batch[name] = file
        size += file.size
    yield batch


def _has(path: Path, file: StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size and sha256_file(path) == file.sha256


@dataclass(frozen=True)
class _Side:
    """The source or the destination of a copy: a folder on this host, or a folder in a bucket."""

    path: Path  # the folder on this host
    folder: BucketFolder | None  # the folder in a bucket
    files: dict[str, StoredFile]  # files of the folder in a bucket
    damaged_names: frozenset[str] = frozenset()  # names of files that cannot be read

    def names(self, source: str) -> list[str]:
        """Return the names of the files to copy."""
        if self.folder:
            return list(self.files)
        if not self.path.is_dir():
            raise ValueError(f"SRC={source} is not a folder, on a disk or in a bucket")
        if (self.path / HOLDER).exists():
            raise ValueError(f"SRC={source}: a job writes there ({self.path / HOLDER}); wait for it, or stop it")
        return [name for name, _ in folder_files(self.path)]

    def describe(self, name: str) -> StoredFile:
        """Return digest and size of a file."""
        path = self.path / name
        return self.files[name] if self.folder else StoredFile(sha256_file(path), path.stat().st_size, ())

    def contents(self, names: Iterable[str]) -> Contents:
        """Return the names, and functions that read the digests and first lines of these files."""
        return Contents(frozenset(names), lambda name: self.describe(name).sha256, self._first_line)

    def _first_line(self, name: str) -> bytes:
        if self.folder:
            return self.folder.first_part(name, self.files[name]).partition(b"\n")[0]
        with open(self.path / name, "rb") as file:
            return file.readline().rstrip(b"\n")


def _require_same(origin: _Side, names: Sequence[str], target: _Side, destination: str) -> None:
    """Raise FileExistsError if the destination is of another kind, or has files of another source."""
    destination_names = list(target.files) if target.folder else [name for name, _ in folder_files(target.path)]
    require_same_kind(names, destination_names, destination)
    source_contents, destination_contents = origin.contents(names), target.contents(destination_names)

    def first_line(name: str) -> bytes:
        if name not in target.damaged_names:
            return destination_contents.first_line(name)
        return (
            source_contents.first_line(name)
            if source_contents.digest(name) == destination_contents.digest(name)
            else _DAMAGED
        )

    require_same_folder(source_contents, replace(destination_contents, first_line=first_line), destination)


def _open_source(source: str) -> _Side:
    if is_bucket_address(source):
        folder = BucketFolder(source)
        if files := folder.files():
            return _Side(Path(), folder, files)
    path = local_path(source)  # fetches objects of other programs, and subfolders of a run, to this host
    fetch_files(path)
    return _Side(path, None, {})


def _to_bucket(
    source: str,
    target: BucketFolder,
    origin: _Side,
    names: Sequence[str],
    verify: bool,
    show: Callable[[int], None],
) -> CopyResult:
    stored_files, damage = _begin_copy(target, origin, names, verify)
    pending_files = dict[str, StoredFile]()
    new_count, size, last_publish, states = 0, 0, time.monotonic(), dict[str, FileState]()

    def describe(name: str) -> tuple[str, StoredFile]:
        states[name] = file_state(origin.path / name)
        return name, origin.describe(name)

    def publish() -> None:
        nonlocal last_publish
        target.commit(pending_files, stored_files)
        stored_files.update(pending_files)
        damage.difference_update(pending_files)
        pending_files.clear()
        last_publish = time.monotonic()

    for batch in _batches(map(describe, names)):
        missing_files = {
            name: file
            for name, file in batch.items()
            if name not in stored_files or name in damage or stored_files[name].sha256 != file.sha256
        }
        if origin.folder:
            pending_files |= target.copy_files(origin.folder, missing_files)
        else:
            pending_files |= target.upload({name: origin.path / name for name in missing_files})
        for name, file in missing_files.items():
            if pending_files[name].sha256 != file.sha256 or file_state(origin.path / name) != states[name]:
                raise ValueError(f"{source}/{name} was changed while it was copied; wait for the job that writes there")
        new_count += len(missing_files)
        for file in batch.values():
            size += file.size
            show(file.size)
        if time.monotonic() - last_publish > _PUBLISHED_AFTER:
            publish()
    publish()
    target.bucket.delete([COPYING])
    final = target.files()
    if missing_names := [name for name in names if name not in final]:
        raise BucketError(f"{target}/{missing_names[0]} was removed by another job while it was copied; copy again")
    return CopyResult(source, str(target), len(names), size, new_count)


def _begin_copy(
    target: BucketFolder, origin: _Side, names: Sequence[str], verify: bool
) -> tuple[dict[str, StoredFile], set[str]]:
    """Start a copy to a folder in a bucket, and return the files of the folder and the names of damaged ones.

    Args:
        verify: whether to read the bytes of the folder's files; otherwise none is damaged.

    Raises ValueError if the folder has objects of other programs, and FileExistsError if it has files of another
    source.
    """
    target.bucket.probe()
    keys = [] if target.exists() else target.bucket.list()
    if foreign_keys := [key for key in keys if key and not key.endswith("/") and not is_leftover(key)]:
        raise ValueError(
            f"{target} holds objects that jaxret has not written, such as {foreign_keys[0]}; choose another folder"
        )
    is_first = _announce(target, origin, names)
    try:
        stored_files = target.files()
        damage = {name for name, problem in bucket_problems(target, [*stored_files]) if problem} if verify else set()
        _require_same(origin, names, _Side(Path(), target, stored_files, frozenset(damage)), str(target))
    except BaseException:
        if is_first:
            target.bucket.delete([COPYING])
        raise
    return stored_files, damage


def _announce(target: BucketFolder, origin: _Side, names: Sequence[str]) -> bool:
    """Write a description of the copy to a folder in a bucket; return False if another copy of the source has done so.

    It prevents a copy of another source until this copy is complete: files are published in batches, and only the last
    ones identify the source. Raises FileExistsError if a copy of another source is running or was killed.
    """
    contents = origin.contents(names)
    lines = {name: contents.first_line(name).decode(errors="replace") for name in identifying(names)}
    digests = {name: contents.digest(name) for name in lines}
    body = salted_json({"names": list(names), "digests": digests, "first_lines": lines})
    while not target.bucket.create(COPYING, body):
        if announcement := target.bucket.get(COPYING):
            announced_contents = _parse_contents(announcement.body)
            try:
                require_same_kind(names, announced_contents.names, str(target))
                require_same_folder(
                    replace(contents, first_line=lambda name: lines[name].encode()), announced_contents, str(target)
                )
            except FileExistsError as error:
                raise FileExistsError(
                    f"{error} (a copy to it is running or was interrupted: {target}/{COPYING})"
                ) from None
            return False
    return True


def _parse_contents(body: bytes) -> Contents:
    """Return the contents that another copy has announced."""
    content = json.loads(body)
    digests, lines = content["digests"], content["first_lines"]
    return Contents(frozenset(content["names"]), digests.__getitem__, lambda name: lines[name].encode())


def bucket_problems(folder: BucketFolder, names: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield (name, problem) of each file of a folder in a bucket; the problem is "" if its bytes are sound. All bytes
    are read from the bucket, and none from this host's cache.

    Args:
        names: names of the files; empty: all.
    """
    files = folder.files()
    for name in names or sorted(files):
        try:
            folder.check(name, files[name])
        except BucketError as error:
            yield name, str(error)
        else:
            yield name, ""


def unnamed_objects(folder: BucketFolder) -> tuple[list[str], list[str]]:
    """Return the keys of data objects that belong to no file, and the marks of jobs that are writing or were killed.

    Without marks, the objects belong to killed jobs. Marks are read after the objects and before the manifest, because
    a job adds its objects to the manifest before it removes its mark.
    """
    objects = folder.bucket.list("data")
    marks = [*folder.bucket.list("leases"), *([COPYING] if folder.bucket.version(COPYING) else [])]
    keys = {key for file in folder.files().values() for key in file.parts}
    return [key for key in objects if key not in keys], marks
