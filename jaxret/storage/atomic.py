"""Atomic writes of files, digests, and errors with the path and the cause."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxret.storage.unfinished import is_temporary, lock, sweep, temporary_path

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission",
    errno.EPERM: "not permitted",
    errno.EFBIG: "larger than this process may write",
    errno.EIO: "the disk reports an input/output error",
    errno.ENOENT: "its folder is gone, or takes no files",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.EEXIST: "a file is where a folder should be",
    errno.EISDIR: "a folder has that name",
    errno.ENAMETOOLONG: "the name is too long",
}
# An address with another scheme than gs and s3. Well-known schemes may have one slash, which a Path keeps of the two.
_ADDRESS = re.compile(r"(?!gs:|s3:)(?:(GS|S3|gcs|abfss?|az|azure|hdfs|https?|ftp|file):/|([A-Za-z][\w+.-]*)://)")


class StorageError(OSError):
    """A file or folder cannot be written; the message has its path and the cause."""


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of writing `path`, or a file in it, into StorageErrors in the block; other errors are unchanged."""
    path = Path(path)
    try:
        yield
    except OSError as error:
        error_path = None if error.filename is None else Path(os.fsdecode(error.filename))
        is_own_error = error_path is None or error_path in (path, *path.parents) or path in error_path.parents
        is_own_error |= error_path is not None and is_temporary(error_path.name)
        # np.save gives neither file nor errno.
        if error.errno is None and re.match(r"\d+ requested and \d+ written", str(error)):
            full = shutil.disk_usage(path.parent).free < 1 << 20
            cause = _CAUSES[errno.ENOSPC] if full else "the disk took only a part of it: full, or a quota or limit"
        elif is_own_error and error.errno in _CAUSES:
            cause = _CAUSES[error.errno]
        else:
            raise
        storage_error = StorageError(f"{path} cannot be written: {cause}")
        storage_error.errno = error.errno
        raise storage_error from error


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w", work: Path | None = None) -> Iterator[IO[Any]]:
    """Open a temporary file; it is flushed to disk and replaces `path` when the block succeeds.

    The file is in the folder of `path`, or in the existing folder `work`. Readers see the old file or the new one,
    never a part. Text is UTF-8 with "\\n" line ends. If the block raises, `path` is unchanged and the temporary file is
    removed. Temporary files of killed writers are removed first. Raises StorageError if the disk is full or refuses
    the file.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} is a folder, a device or a pipe: give the name of a file")
    temporary = temporary_path(work / path.name if work else path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    with storage_errors(path):
        if not work:
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path)
        try:
            with open(temporary, mode, **text) as file:  # type: ignore[call-overload]
                lock(file.fileno())
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # the original exception is raised instead
                temporary.unlink()
        sync(path.parent)  # makes the rename itself durable


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Flush every file and folder in a folder to disk, then the folder itself."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(os.path.join(parent, name))
        sync(parent)


def require_writable_disk(folder: str | os.PathLike[str]) -> None:
    """Create the folder and write a test block to it. Raises StorageError with the cause."""
    probe = temporary_path(Path(folder) / "probe")
    with storage_errors(folder):
        probe.parent.mkdir(parents=True, exist_ok=True)
        sweep(Path(folder) / "probe")
        try:
            with open(probe, "wb") as file:
                lock(file.fileno())
                file.write(bytes(4096))  # not empty, because an empty file fits on a full disk
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def require_disk_path(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for an address that is neither gs:// nor s3://, and for ~ in place of the home folder, which no
    shell replaces in --workdir=~/runs. They would be read as folders, such as "https:" and "~"."""
    text = os.fspath(path)
    if text.partition("/")[0] == "~":
        raise ValueError(f"{text}: write the path of your home folder in place of ~ (or ./{text} for a folder named ~)")
    if match := _ADDRESS.match(text):
        scheme = match[1] or match[2]
        if scheme.lower() in ("gs", "s3"):
            raise ValueError(f"{text}: write {scheme.lower()}:// in place of {scheme}://")
        raise ValueError(
            f"{text}: {scheme}:// is not supported: use gs:// or s3://, or copy the "
            "data to a disk or mounted file system and give that path (docs/clusters.md)"
        )


def require_parent(path: str | os.PathLike[str], name: str) -> None:
    """Raise ValueError unless the folder of `path` exists, so that a mistyped path does not create folders.

    `name` is the flag or argument in the error message.
    """
    require_disk_path(path)
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{name}={os.fspath(path)}: there is no folder {parent}; make it, or correct the path")


def require_file_path(path: str | os.PathLike[str], name: str) -> None:
    """Raise the error of `require_parent`, and ValueError if the path of an output file is a folder, a device or a
    pipe."""
    require_parent(path, name)
    if os.path.isdir(path):
        raise ValueError(f"{name}={os.fspath(path)} is a folder; give the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):  # an atomic write would replace it
        raise ValueError(f"{name}={os.fspath(path)} is a device or a pipe; give the name of a file")


def require_folder_path(path: str | os.PathLike[str], name: str) -> None:
    """Raise the error of `require_parent`, and ValueError if the path of an output folder is a file."""
    require_parent(path, name)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{name}={os.fspath(path)} is a file; give the name of a folder")


def write_json(path: str | os.PathLike[str], value: Any, work: Path | None = None) -> None:
    """Write `value` as indented JSON with sorted keys, atomically. Raises ValueError for NaN and infinity."""
    with atomic_write(path, work=work) as file:
        json.dump(value, file, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        file.write("\n")


def require_no_pipe(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a named pipe: a reader would wait for a writer."""
    if Path(path).is_fifo():
        raise ValueError(f"{path} is a pipe; a file is needed here")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a JSON file. Raises ValueError for any defect, with the path, and the line if it is known."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
        return tree

    require_no_pipe(path)
    data = Path(path).read_bytes()
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not valid JSON (the byte 0x{data[error.start]:02x} is not UTF-8)") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # a duplicate key, or a number with thousands of digits
        reason = "a number has too many digits" if "set_int_max_str_digits" in str(error) else str(error)
        raise ValueError(f"{path}: not valid JSON ({reason})") from error


def with_digest(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with its own digest added as "sha256"."""
    return {**value, "sha256": sha256_json(dict(value))}


def read_with_digest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the mapping in a JSON file that was written with `with_digest`, without its digest.

    Raises FileNotFoundError if the file does not exist, and ValueError with its path if the digest does not match.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise TypeError(f"a JSON object is expected, not {type(content).__name__}")
        matches_digest = content.pop("sha256", None) == sha256_json(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if not matches_digest:
        raise ValueError(f"{path}: damaged (its SHA-256 is not the one that was written)")
    return content


def cache_folder(name: str) -> Path:
    """Return the cache folder $XDG_CACHE_HOME/jaxret/NAME, by default in ~/.cache, without creating it.

    Raises RuntimeError if the user has no home folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "jaxret" / name


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hex. It is read in blocks."""
    require_no_pipe(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value in canonical form (sorted keys, no spaces), in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return sha256_bytes(text.encode("utf-8"))


def sha256_json_lists(lists: Iterable[Iterable[Any]]) -> str:
    """Return `sha256_json` of a list of lists, with one item in memory at a time."""
    encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
    digest = hashlib.sha256(b"[")
    for index, items in enumerate(lists):
        digest.update(b",[" if index else b"[")
        for number, item in enumerate(items):
            digest.update(f"{',' if number else ''}{encode(item)}".encode())
        digest.update(b"]")
    digest.update(b"]")
    return digest.hexdigest()
