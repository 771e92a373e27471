"""Working copies of folders and files in buckets, on this host's disk.

`local_path` returns the copy of an address, which is read and written like any other path. `publish` writes the files
that this process has changed back to the bucket. Jobs call it when a run is consistent: after a checkpoint, after a
shard, and at the end. A job that dies loses only unpublished files, which its next start writes again.

Each process has its own copy, with a lock. The copy is removed when the process ends, unless some files could not be
published; then a line on stderr has its path. The copy of a killed process is removed by the next process that makes a
copy.

Only the first process of a job publishes. The other processes upload their files, such as parts of checkpoints, and the
first adds them to the folder (`include`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxret.parallel.first_process import is_first_process
from jaxret.storage.atomic import (
    StorageError,
    cache_folder,
    require_writable_disk,
    sha256_file,
    sha256_json,
    storage_errors,
)
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.bucket import Bucket, BucketError
from jaxret.storage.buckets.bucket_folder import (
    MANIFEST,
    BucketFolder,
    ChangedFolderError,
    StoredFile,
    is_leftover,
    require_name_inside,
)
from jaxret.storage.buckets.object_cache import CachedFile, fetch, version_name
from jaxret.storage.file_state import MISSING, FileState, file_state
from jaxret.storage.unfinished import lock, sweep, temporary_path

# Folders of results, which any job may replace; the last result is kept.
_REPLACED = ("encoding/", "eval/", "runs/", "warnings/")
# Indexes of passages and of their metadata. Any command computes them if they are missing.
_DERIVED = re.compile(r"(^|/)embeddings/[^/]+/((passages|records)\.(npy|jsonl?)|metadata/.*)$")
# Arrays of shards. They are fetched when a corpus is opened, because an encoding job does not need other jobs' arrays.
_VECTORS = re.compile(r"-\d+-of-\d+\.npy$")
_ATTEMPTS = 5  # attempts to fetch files that another job replaces at the same time
_COPIES: dict[str, WorkingCopy] = {}
_LOCK = threading.RLock()


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path on this host for a path or for the address of a folder or file in a bucket.

    An address is fetched when it is first used. If the address is a folder that jaxret wrote, or is in such a folder,
    this folder is fetched; else all objects below the address; else the object at the address. If there are no objects,
    the path does not exist, and files that are written to it are published.

    Raises BucketError if the bucket cannot be read.
    """
    if not is_bucket_address(path):
        return Path(path)
    bucket = Bucket(os.fspath(path))
    with _LOCK:
        if not (copy := copy_of(bucket.address)):
            root = enclosing_folder(bucket.address)
            copy = _COPIES[root] = WorkingCopy(root)
        return copy.path_of(bucket.address)


def enclosing_folder(address: str) -> str:
    """Return the address of the folder written by jaxret that is or contains an address, or else the address itself."""
    bucket = Bucket(address)
    if bucket.version(MANIFEST):
        return bucket.address
    parts = bucket.folder.split("/")
    for count in range(len(parts) - 1, 0, -1):
        parent = Bucket(f"{bucket.scheme}://{bucket.name}/{'/'.join(parts[:count])}")
        with contextlib.suppress(BucketError):  # the user may have permissions for this address only
            if parent.version(MANIFEST):
                return parent.address
    return bucket.address


def copy_of(path: str | os.PathLike[str]) -> WorkingCopy | None:
    """Return the working copy that contains an address or a local path; None if no copy does."""
    if not _COPIES:
        return None
    if is_bucket_address(path):
        address = Bucket(os.fspath(path)).address
        copies = [copy for copy in _COPIES.values() if f"{address}/".startswith(f"{copy.address}/")]
    else:
        absolute = Path(path).absolute()
        copies = [copy for copy in _COPIES.values() if absolute.is_relative_to(copy.path)]
    return max(copies, key=lambda copy: len(copy.address), default=None)


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Raise StorageError with the cause unless files can be written to a folder. On a disk, the folder is created.

    Jobs call it before they compute results. It writes a test block to a disk; for a working copy, the first call
    writes a test object to the bucket.
    """
    if copy := copy_of(folder):
        copy.require_writable()
    else:
        require_writable_disk(folder)


def refresh(path: str | os.PathLike[str]) -> None:
    """Fetch the files below a path that other processes have published, if it is in a working copy.

    Raises BucketError if the bucket cannot be read.
    """
    if copy := copy_of(path):
        copy.refresh(copy.name_of(Path(path)))


def stored_file(path: str | os.PathLike[str]) -> StoredFile | None:
    """Return digest and size of a file of a working copy whose bytes are only in the bucket; None for any other."""
    copy = copy_of(path)
    return copy.stored_file(Path(path)) if copy else None


def fetch_files(folder: str | os.PathLike[str], names: Collection[str] | None = None) -> None:
    """Fetch the files of a folder in a working copy whose bytes are only in the bucket.

    `names` are the names of the files that are needed; None: all files. Raises BucketError if the bucket cannot be
    read.
    """
    if copy := copy_of(folder):
        copy.fetch_files(Path(folder), names)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for messages: for a path in a working copy, its address."""
    if is_bucket_address(path):
        return Bucket(os.fspath(path)).address
    if not (copy := copy_of(path)):
        return os.fspath(path)
    name = Path(path).absolute().relative_to(copy.path).as_posix()
    return copy.address if name == "." else f"{copy.address}/{name}"


def shown_message(message: str) -> str:
    """Return a message with addresses instead of paths in working copies."""
    for copy in _COPIES.values():
        message = message.replace(str(copy.path), copy.address)
        message = message.replace(str(copy.path.parent), copy.address.rpartition("/")[0])
    return message


def publish(path: str | os.PathLike[str]) -> None:
    """Write back the files that this process has changed, if a path is in a working copy.

    Raises BucketError if the bucket cannot be written, ChangedFolderError if another job has written the same files.
    """
    if copy := copy_of(path):
        copy.publish()


def publish_all() -> None:
    """Write back the files that this process has changed in all working copies, then remove the copies.

    Raises the first error of `publish` after all copies were tried.
    """
    first_error: StorageError | None = None
    with _LOCK:
        for copy in list(_COPIES.values()):
            try:
                copy.publish()
            except StorageError as error:
                first_error = first_error or error
            else:
                copy.remove()
                del _COPIES[copy.address]
    if first_error:
        raise first_error


class WorkingCopy:
    """A copy of the folder, objects or object at an address.

    Attributes:
        address: the address, gs:// or s3://.
        path: the path of the copy; its name is the last part of the address.
    """

    def __init__(self, address: str) -> None:
        bucket = Bucket(address)
        if not bucket.folder:
            raise ValueError(f"{address}: give a folder in the bucket, such as {address}/NAME")
        self.address, self._process = address, os.getpid()
        self.folder = BucketFolder(bucket)
        root = cache_folder("working")
        with storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            sweep(root / "copy")
            self._parent = temporary_path(root / "copy")
            self._parent.mkdir()
            self._lock = os.open(self._parent, os.O_RDONLY)
        lock(self._lock)
        self.path = self._parent / bucket.folder.rpartition("/")[2]
        self._files: dict[str, StoredFile] = {}  # files of the bucket, as this process has seen or written them
        self._states: dict[str, FileState] = {}  # states of these files in the copy
        self._results: dict[str, FileState] = {}  # states of published results, if the address is the address of a file
        self._included_files: dict[str, StoredFile] = {}  # uploaded files that the next `publish` adds
        self._remote_names: set[str] = set()  # names of files in `_files` whose bytes are only in the bucket
        self._writable = False  # whether `probe` has succeeded
        self._plain = False  # whether jaxret did not write the objects at the address and only reads them
        try:
            self._fetch(bucket)
        except BaseException:
            self.remove()
            raise

    def path_of(self, address: str) -> Path:
        """Return the path in the copy of an address below the copy's address."""
        return self.path / address[len(self.address) :].strip("/")

    def _fetch(self, bucket: Bucket) -> None:
        if self.folder.exists():
            self.refresh()
            return
        parent, _, name = bucket.address.rpartition("/")
        # Web consoles create empty objects for folders.
        keys = [key for key in bucket.list() if key and not key.endswith("/") and not is_leftover(key)]
        for key in keys:
            self._fetch_object(bucket, key, key)
        if not keys and parent.count("/") >= 2:
            self._fetch_object(Bucket(parent), name, "")

    def _fetch_object(self, bucket: Bucket, key: str, name: str) -> None:
        """Fetch an object that jaxret has not written, if it exists, to the file `name` of the copy."""
        require_name_inside(self.address, name)
        path = self.path / name
        if (version := bucket.version(key)) is not None:
            address = f"{bucket.address}/{key}"
            fetch(CachedFile(version_name(address, version), "", address), lambda: bucket.parts(key, version), path)
            self._states[name] = file_state(path)
            self._plain = True

    def stored_file(self, path: Path) -> StoredFile | None:
        """Return digest and size of a file whose bytes are only in the bucket; None for any other path."""
        name = self.name_of(path)
        return self._files[name] if name in self._remote_names else None

    def fetch_files(self, folder: Path, names: Collection[str] | None = None) -> None:
        """Fetch the files of a folder whose bytes are only in the bucket. `names` limits them to some names; None:
        all."""
        name = self.name_of(folder)
        remote_names = None if names is None else {f"{_prefix(name)}{remote_name}" for remote_name in names}

        def is_needed(remote: str) -> bool:
            return remote.startswith(_prefix(name)) and (remote_names is None or remote in remote_names)

        if any(map(is_needed, self._remote_names)):
            self.refresh(name, is_needed)

    def digest(self, folder: Path) -> str:
        """Return a digest of the names and digests of the files below a folder that this process has seen."""
        prefix = _prefix(self.name_of(folder))
        return sha256_json({name: file.sha256 for name, file in self._files.items() if name.startswith(prefix)})

    def name_of(self, path: Path) -> str:
        """Return the name of a path in the copy, relative to it; "" for the copy itself."""
        name = path.absolute().relative_to(self.path).as_posix()
        return "" if name == "." else name

    def refresh(self, folder: str = "", is_needed: Callable[[str], bool] = lambda _: False) -> None:
        """Fetch the files below a folder that are new or were changed in the bucket.

        Files that this process has changed are kept. Files that were removed in the bucket are removed. Raises
        BucketError if the bucket cannot be read, or if another job replaces files faster than they are fetched.

        `folder` is the name of the folder, "" for all files. `is_needed` is a function of a name that returns whether
        to fetch the array of a shard; of other arrays only digest and size are fetched (`stored_file`).
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._refresh(folder, is_needed)
            except ChangedFolderError:  # another job changed the folder after the manifest was read
                self.folder.forget_groups()
        return self._refresh(folder, is_needed)

    def _refresh(self, folder: str, is_needed: Callable[[str], bool]) -> None:
        prefix = _prefix(folder)
        files = {name: file for name, file in self.folder.files().items() if name.startswith(prefix)}
        removed_names = [name for name in self._files if name.startswith(prefix) and name not in files]
        removed_names = [
            name for name in removed_names if file_state(self.path / name) == self._states.get(name, MISSING)
        ]
        for name in removed_names:
            (self.path / name).unlink(missing_ok=True)
            del self._files[name]
            self._states.pop(name, None)
            self._remote_names.discard(name)
        self._remove_empty_folders(removed_names)

        def record(name: str) -> None:
            self._files[name], self._states[name] = files[name], file_state(self.path / name)
            self._remote_names.discard(name)

        changed_files = {}
        for name, file in files.items():
            is_deferred = bool(_VECTORS.search(name)) and not is_needed(name)
            if self._files.get(name) == file and (is_deferred or name not in self._remote_names):
                continue
            path = self.path / name
            if file_state(path) != self._states.get(name, MISSING):
                continue  # this process has changed the file; `publish` detects a conflict
            if is_deferred:
                path.parent.mkdir(parents=True, exist_ok=True)  # files of a missing folder would count as removed
                path.unlink(missing_ok=True)
                self._states.pop(name, None)
                self._files[name] = file
                self._remote_names.add(name)
            else:
                changed_files[name] = file
        self.folder.download(changed_files, self.path, record)

    def _remove_empty_folders(self, removed_names: Sequence[str]) -> None:
        """Remove the folders of removed files if they are empty, in the copy and in the bucket."""
        if not removed_names:
            return
        remaining_folders = _folders(self._files)
        for folder in sorted(_folders(removed_names) - remaining_folders, key=len, reverse=True):
            with contextlib.suppress(OSError):  # the folder has other files of this process
                (self.path / folder).rmdir()

    def changes(self, folder: str = "") -> tuple[dict[str, Path], list[str]]:
        """Return the files below a folder that this process has written, by name, and the names of files that it has
        removed."""
        prefix = _prefix(folder)
        paths = {f"{prefix}{name}": path for name, path in folder_files(self.path / folder)}
        changed_files = {name: path for name, path in paths.items() if file_state(path) != self._states.get(name)}
        return changed_files, [name for name in self._states if name.startswith(prefix) and name not in paths]

    def publish(self) -> None:
        """Write the changes back. Raises BucketError if that fails, ChangedFolderError for a conflict."""
        if not is_first_process():
            return
        if not self.path.is_dir() and self._new_results():
            self.require_writable()
            self._publish_results()
            return
        changed_files, removed_names = self.changes()
        removed_names += [name for name in self._remote_names if not (self.path / name).parent.exists()]
        if not changed_files and not removed_names and not self._included_files:
            return
        try:
            self.require_writable()
        except BucketError:
            if all(map(_DERIVED.search, [*changed_files, *removed_names])) and not self._included_files:
                return  # a reader without permission to write
            raise
        if removed_names:  # otherwise a group that a killed job left behind would add these files again
            self.folder.sweep_groups("")
        states = {name: file_state(path) for name, path in changed_files.items()}
        new = {name: path for name, path in changed_files.items() if name not in self._included_files}
        stored_files = self.folder.upload({name: path for name, path in new.items() if not self._is_same(name, path)})
        stored_files |= self._included_files
        self._commit(stored_files, {**stored_files, **dict.fromkeys(removed_names)}, self._files)
        self._states |= states
        self._remote_names = (self._remote_names - set(removed_names)) | (
            self._included_files.keys() - changed_files.keys()
        )
        self._included_files = {}

    def _publish_results(self) -> None:
        """Upload the results as plain objects, which other programs can read: the object at the address, and objects
        next to it."""
        parent = Bucket(self.address.rpartition("/")[0])
        for path in self._new_results():
            state = file_state(path)
            parent.put(path.name, path.read_bytes())
            self._results[path.name] = state
            if path == self.path:
                self._states[""] = state

    def _new_results(self) -> list[Path]:
        """Return the result files that this process has written: at the address, and next to it."""
        files = [path for path in self._parent.iterdir() if path.is_file() and not path.name.startswith(".")]
        own_states = {self.path.name: self._states.get("", MISSING)} | self._results
        return sorted(path for path in files if file_state(path) != own_states.get(path.name, MISSING))

    def include(self, files: Mapping[str, StoredFile]) -> None:
        """Add final files that processes of this job have uploaded to the folder at the next `publish`."""
        self._included_files |= files

    def _is_same(self, name: str, path: Path) -> bool:
        """Return whether a file that was written again has the same bytes as in the bucket."""
        file = self._files.get(name)
        return bool(file and file.size == path.stat().st_size and file.sha256 == sha256_file(path))

    def publish_group(self, folder: str, group: str) -> bool:
        """Add the changed files below a folder as a group, at once.

        Returns False if another job has added that group: its files are fetched, and replace the files of this process.
        """
        self.require_writable()
        stored_files, states = self._upload(self.changes(folder)[0])
        is_new = self.folder.add_group(group, stored_files)
        if is_new:
            self._files |= stored_files
            self._states |= states
        else:
            for name in stored_files:
                (self.path / name).unlink(missing_ok=True)
                self._states.pop(name, None)
                self._files.pop(name, None)
            self.refresh(folder)
        return is_new

    def publish_folder(self, folder: str) -> None:
        """Write back the changes below a folder, and move the groups of this folder into the manifest."""
        groups = {name: files for name, files in self.folder.groups(folder).items() if self.has_seen(files)}
        members = {name: file for files in groups.values() for name, file in files.items()}
        changed_files, removed_names = self.changes(folder)
        stored_files, states = self._upload(changed_files)
        kept_files = {name: file for name, file in members.items() if name not in removed_names}
        base = {name: file for name, file in self._files.items() if name not in members}
        self._commit(
            stored_files,
            {**kept_files, **stored_files, **{name: None for name in removed_names if name not in members}},
            base,
        )
        for name in removed_names:
            self._files.pop(name, None)
            self._states.pop(name, None)
        self._states |= states
        self.folder.remove_groups(groups)
        self.folder.discard(file for name, file in members.items() if name in removed_names)

    def has_seen(self, files: Mapping[str, StoredFile]) -> bool:
        """Return whether this process has fetched or written some of these files with these bytes."""
        return any(self._files.get(name) == file for name, file in files.items())

    def require_writable(self) -> None:
        """Raise BucketError if nothing can be written at the address."""
        if self._plain and self.path.is_dir():
            raise BucketError(
                f"{self.address}: jaxret did not write its files and only reads them; give another folder for "
                "output, or a copy that `jaxret copy` makes"
            )
        if not self._writable:
            self.folder.bucket.probe()
            self._writable = True

    def _upload(self, paths: Mapping[str, Path]) -> tuple[dict[str, StoredFile], dict[str, FileState]]:
        # Read before the upload, so that a change during the upload is noticed later.
        states = {name: file_state(path) for name, path in paths.items()}
        return self.folder.upload(paths), states

    def _commit(
        self,
        stored_files: Mapping[str, StoredFile],
        changes: Mapping[str, StoredFile | None],
        base: Mapping[str, StoredFile],
    ) -> None:
        """Commit changes, and record them.

        `stored_files` are the files that were uploaded for these changes; they are deleted after a conflict.
        """
        try:
            self.folder.commit(changes, base, lambda name: name.startswith(_REPLACED))
        except ChangedFolderError:
            self.folder.discard(stored_files.values())
            self._included_files = {}
            raise
        for name, change in changes.items():
            if change:
                self._files[name] = change
            else:
                self._files.pop(name, None)
                self._states.pop(name, None)

    def remove(self) -> None:
        """Delete the copy if this process made it."""
        if os.getpid() == self._process:
            shutil.rmtree(self._parent, ignore_errors=True)
            os.close(self._lock)

    def keep(self) -> Path:
        """Rename the copy, so that it is kept after the end of the process, and return its new path."""
        folder = self._parent.with_name(f"unpublished-{secrets.token_hex(4)}")
        self._parent.rename(folder)
        return folder / self.path.name


def _prefix(folder: str) -> str:
    return f"{folder}/" if folder else ""


def _folders(names: Iterable[str]) -> set[str]:
    """Return the names of all folders that contain files with these names."""
    folders = {name.rpartition("/")[0] for name in names}
    while new := {folder.rpartition("/")[0] for folder in folders} - folders:
        folders |= new
    return folders - {""}


def folder_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the files in a folder, without locks, leases and unfinished files (names with a dot)."""
    if folder.is_file():
        yield "", folder
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(parent, name)
                yield path.relative_to(folder).as_posix(), path


@atexit.register
def _end() -> None:
    """Remove the copies of this process. A copy with changes is kept, and its path is printed on stderr."""
    for copy in list(_COPIES.values()):
        with contextlib.suppress(OSError, ValueError):
            changed_files, removed_names = copy.changes()
            changed_files = {name: path for name, path in changed_files.items() if not _DERIVED.search(name)}
            if (changed_files or removed_names) and copy._process == os.getpid() and not copy._plain:
                print(
                    f"{copy.address}: {len(changed_files)} file(s) were not published; they are in {copy.keep()}",
                    file=sys.stderr,
                )
                continue
        copy.remove()
