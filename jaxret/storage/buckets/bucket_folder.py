"""A folder of files in a bucket: a small manifest lists the files with digests, and their bytes never change.

<folder>/files.json        the manifest: name -> digest, size, objects; changed only by replace-if-unchanged
<folder>/groups/NAME.json  files that one of several jobs adds at once, such as a shard: created if absent, and moved
                           into the manifest when all jobs are done
<folder>/data/ID-SHA256    a file, or a part of a large file; with the random ID, no two writers write the same object

A reader accepts only bytes with the digests in one manifest, so it never sees a mixture. Files are visible when the
manifest lists them. A writer that is killed, or sleeps while another one writes, leaves objects that no manifest lists.
A second writer of the same file gets an error. Neither clocks nor leases decide which files are valid.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from jaxret.storage.atomic import sha256_json, storage_errors
from jaxret.storage.buckets.bucket import PART, Bucket, BucketError, salted_json
from jaxret.storage.buckets.object_cache import CachedFile, fetch, write_file

MANIFEST, GROUPS, DATA = "files.json", "groups", "data"
REPAIR = "jaxret copy --verify, from a copy of the folder, repairs it"
_DAMAGED = f"is damaged in the bucket: its SHA-256 is not the one that was written; {REPAIR}"
_AT_ONCE = 8  # files that are transferred at a time
_PARTS = 2  # parts of each file that are read ahead
_ATTEMPTS = 100  # attempts to replace a manifest that other jobs also replace
COPYING = ".copying.json"  # describes an unfinished copy to the folder (`copy_folder`)
_LEFTOVER = re.compile(rf"(.+/)?(\.probe-[0-9a-f]{{16}}|{re.escape(COPYING)}|{DATA}/[0-9a-f]{{16}}-[0-9a-f]{{64}})")


class ChangedFolderError(BucketError):
    """Another job has written the same file of a folder in a bucket."""


class DamagedObjectError(BucketError):
    """Objects of a file of a folder in a bucket are missing, or are not those that were written."""


def require_name_inside(address: str, name: str) -> None:
    """Raise BucketError if the name of a file in a bucket leads out of the folder to which it is written."""
    if name.startswith("/") or any(part in ("..", ".") for part in name.split("/")):
        raise BucketError(f"{address}: the name of its object {name!r} is not that of a file in a folder")


def is_leftover(key: str) -> bool:
    """Return whether an object is a leftover of a job that was killed before it wrote a manifest."""
    return bool(_LEFTOVER.fullmatch(key))


@dataclass(frozen=True)
class StoredFile:
    """A file of a folder in a bucket."""

    sha256: str
    size: int  # bytes
    parts: tuple[str, ...]  # keys of its objects


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, StoredFile]
    version: bytes  # version of files.json; b"" if it does not exist


class BucketFolder:
    """The files below an address. Opening it sends no request.

    Args:
        bucket: the address of the folder, or its objects.
    """

    def __init__(self, bucket: Bucket | str) -> None:
        self.bucket = bucket if isinstance(bucket, Bucket) else Bucket(bucket)
        self._groups: dict[str, dict[str, StoredFile]] = {}  # key of a group -> its files by name

    def __str__(self) -> str:
        return self.bucket.address

    def exists(self) -> bool:
        """Return whether the folder has a manifest or a group."""
        return self.bucket.version(MANIFEST) is not None or bool(self.bucket.list(GROUPS))

    def files(self) -> dict[str, StoredFile]:
        """Return the files of the folder, by name. Raises BucketError if the manifest or a group is damaged."""
        groups = self.groups("")  # read first: a group that is moved during this call is then found in the manifest
        files = self._manifest().files
        for group_files in groups.values():
            files = group_files | files
        return files

    def groups(self, folder: str) -> dict[str, dict[str, StoredFile]]:
        """Return the files of each group below a folder, by the name of the group.

        A group never changes, so it is read only once.
        """
        prefix = f"{GROUPS}/{folder}".rstrip("/")
        keys = self.bucket.list(prefix)
        new = [key for key in keys if key not in self._groups]
        for key, group in zip(new, self.bucket.get_several(new), strict=True):
            if group:  # otherwise it has just been moved
                self._groups[key] = _parse(f"{self}/{key}", group.body)
        for key in {key for key in self._groups if key.startswith(f"{prefix}/")}.difference(keys):
            del self._groups[key]
        return {
            key.removeprefix(f"{GROUPS}/").removesuffix(".json"): self._groups[key]
            for key in keys
            if key in self._groups
        }

    def forget_groups(self) -> None:
        """Forget the groups that were read: a group may be withdrawn and added again with other bytes."""
        self._groups.clear()

    def _manifest(self) -> _Manifest:
        entry = self.bucket.get(MANIFEST)
        return _Manifest(_parse(f"{self}/{MANIFEST}", entry.body), entry.version) if entry else _Manifest({}, b"")

    def upload(self, paths: Mapping[str, Path]) -> dict[str, StoredFile]:
        """Upload the bytes of local files, and return their descriptions; no manifest lists them yet."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(paths, pool.map(self._upload_file, paths.values()), strict=True))

    def _upload_file(self, path: Path) -> StoredFile:
        with open(path, "rb") as file:
            return self._store(iter(lambda: file.read(PART), b""))

    def _store(self, parts: Iterable[bytes]) -> StoredFile:
        digest, size, keys = sha256(), 0, []
        for part in parts:
            digest.update(part)
            size += len(part)
            keys.append(f"{DATA}/{secrets.token_hex(8)}-{sha256(part).hexdigest()}")
            self.bucket.put(keys[-1], part)
        return StoredFile(digest.hexdigest(), size, tuple(keys))

    def discard(self, files: Iterable[StoredFile]) -> None:
        """Delete the bytes of files that no manifest lists."""
        self.bucket.delete(key for file in files for key in file.parts)

    def commit(
        self,
        changes: Mapping[str, StoredFile | None],
        base: Mapping[str, StoredFile],
        replaceable: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Change the manifest, and delete the bytes that are replaced.

        Args:
            changes: file name -> description of the new bytes, or None for a file that is removed.
            base: the files that the caller has read. The bucket must still have them where `changes` changes them.
            replaceable: function of a name that returns whether this job may replace a file of another job without
                having read it.

        Raises:
            ChangedFolderError: another job has written a file since this job read it.
            BucketError: other jobs change the manifest at every attempt.
        """
        for _ in range(_ATTEMPTS):
            manifest = self._manifest()
            for name, change in changes.items():
                current, expected = manifest.files.get(name), base.get(name)
                if _digest(current) not in (_digest(expected), _digest(change)) and not replaceable(name):
                    raise ChangedFolderError(
                        f"{self}/{name}: another job has written it since this one read it; run the command again, "
                        "on the new files"
                    )
            files = {name: file for name, file in (manifest.files | dict(changes)).items() if file}
            if files == manifest.files:
                return
            body = _body(files)
            if self._write_manifest(body, manifest.version):
                keys = {key for file in files.values() for key in file.parts}
                self.bucket.delete(
                    {key for name in changes if name in manifest.files for key in manifest.files[name].parts} - keys
                )
                return
        raise BucketError(f"{self}/{MANIFEST}: other jobs change it too often; run the command again")

    def _write_manifest(self, body: bytes, version: bytes) -> bool:
        return self.bucket.replace(MANIFEST, body, version) if version else self.bucket.create(MANIFEST, body)

    def add_group(self, name: str, files: Mapping[str, StoredFile]) -> bool:
        """Add files as a group; if another job has added a group with this name, delete the bytes, and return False."""
        if self.bucket.create(f"{GROUPS}/{name}.json", _body(files)):
            return True
        self.discard(files.values())
        return False

    def sweep_groups(self, folder: str) -> None:
        """Remove the groups below a folder whose files are in the manifest: a job was killed before it removed them, or
        a late job added them again."""
        groups, files = self.groups(folder), self._manifest().files
        finished_groups = {name: members for name, members in groups.items() if members.keys() <= files.keys()}
        self.remove_groups(finished_groups)
        keys = {key for file in files.values() for key in file.parts}
        self.bucket.delete(
            {key for members in finished_groups.values() for file in members.values() for key in file.parts} - keys
        )

    def remove_groups(self, names: Iterable[str]) -> None:
        """Remove groups, but not the bytes of their files."""
        self.bucket.delete(f"{GROUPS}/{name}.json" for name in names)

    def download(
        self, files: Mapping[str, StoredFile], folder: Path, on_file: Callable[[str], None] = lambda name: None
    ) -> None:
        """Write files of the folder into a folder on this host, through the host's cache.

        `on_file` is called with the name of each file after it was written, on any thread. Raises ChangedFolderError if
        bytes are missing, BucketError if they are damaged.
        """

        def download(item: tuple[str, StoredFile]) -> None:
            name, file = item
            cache_file = CachedFile(file.sha256, file.sha256, f"{self}/{name}")
            fetch(cache_file, lambda: self._parts(name, file), folder / name)
            on_file(name)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(download, files.items()))

    def write(self, files: Mapping[str, StoredFile], folder: Path) -> None:
        """Write files of the folder into a folder on this host, without the cache.

        Raises ChangedFolderError if bytes are missing, BucketError if they are damaged.
        """

        def write(item: tuple[str, StoredFile]) -> None:
            name, file = item
            with storage_errors(folder / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(folder / name, CachedFile(file.sha256, file.sha256, f"{self}/{name}"), self._parts(name, file))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(write, files.items()))

    def first_part(self, name: str, file: StoredFile) -> bytes:
        """Return the first part of a file's bytes."""
        return next(self._parts(name, file), b"")

    def check(self, name: str, file: StoredFile) -> None:
        """Read a file's bytes from the bucket. Raises DamagedObjectError if they are missing, or the digest differs."""
        digest = sha256()
        for part in self._parts(name, file):
            digest.update(part)
        if digest.hexdigest() != file.sha256:
            raise DamagedObjectError(f"{self}/{name} {_DAMAGED}")

    def copy_files(self, source: BucketFolder, files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
        """Copy the bytes of files of another folder, and return their descriptions in this folder (see `upload`).

        Raises DamagedObjectError if they are missing or damaged.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            copies = pool.map(lambda name: self._copy_file(source, name, files[name]), files)
            return dict(zip(files, copies, strict=True))

    def _copy_file(self, source: BucketFolder, name: str, file: StoredFile) -> StoredFile:
        copy = self._store(source._parts(name, file))
        if copy.sha256 != file.sha256:
            self.discard([copy])
            raise DamagedObjectError(f"{source}/{name} {_DAMAGED}")
        return copy

    def _parts(self, name: str, file: StoredFile) -> Iterator[bytes]:
        for key, part in zip(file.parts, self.bucket.get_several(file.parts, _PARTS), strict=True):
            if part is None:
                if self.files().get(name) == file:
                    raise DamagedObjectError(
                        f"{self}/{name}: its object {key} is missing, though {MANIFEST} names it; {REPAIR}"
                    )
                raise ChangedFolderError(f"{self}/{name}: another job has just replaced it; run the command again")
            yield part.body


def _digest(file: StoredFile | None) -> str:
    return file.sha256 if file else ""


def _body(files: Mapping[str, StoredFile]) -> bytes:
    content = {name: [file.sha256, file.size, *file.parts] for name, file in sorted(files.items())}
    return salted_json({"files": content, "sha256": sha256_json(content)})


def _parse(address: str, body: bytes) -> dict[str, StoredFile]:
    """Return the files of a manifest or group. Raises BucketError if it is damaged or names a file outside."""
    try:
        content = json.loads(body)
        if sha256_json(content["files"]) != content["sha256"]:
            raise ValueError("its SHA-256 is not the one that was written")
        files = {
            name: StoredFile(digest, size, tuple(parts)) for name, (digest, size, *parts) in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BucketError(f"{address} is damaged, or another program's ({error})") from error
    for name in files:
        require_name_inside(address, name)
    return files
