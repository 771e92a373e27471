"""Files that are either whole or not there: atomic writes, digests, and errors that say which file and why."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

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
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)


class StorageError(OSError):
    """A file or folder that cannot be written; the text names it and the cause."""


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of writing `path`, or what is in it, in the block become StorageErrors; those of other files stay as they
    are."""
    path = Path(path)
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename))
        ours = named is None or named in (path, *path.parents) or path in named.parents
        ours |= named is not None and bool(_TEMPORARY.fullmatch(named.name))
        if error.errno is None and re.match(r"\d+ requested and \d+ written", str(error)):  # np.save: no file, no cause
            full = shutil.disk_usage(path.parent).free < 1 << 20
            cause = _CAUSES[errno.ENOSPC] if full else "the disk took only a part of it: full, or a quota or limit"
        elif ours and error.errno in _CAUSES:
            cause = _CAUSES[error.errno]
        else:
            raise
        told = StorageError(f"{path} cannot be written: {cause}")
        told.errno = error.errno
        raise told from error


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w", work: Path | None = None) -> Iterator[IO[Any]]:
    """Opens a temporary file beside `path`, or in the folder `work`, which must be there; on success flushes it to disk
    and renames it to `path`.

    A reader therefore sees the old file or the new one, never half of one. Text is UTF-8 with "\\n" line ends.
    If the block raises, `path` is untouched and the temporary file is removed. Raises StorageError if the disk is full
    or will not take the file.
    """
    path = Path(path)
    temporary = _beside(work / path.name if work else path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    with naming(path):
        if not work:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, mode, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # what went wrong first is what must be told
                temporary.unlink()
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # makes the rename itself durable
        finally:
            os.close(directory)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # hosts that share a disk can share pids


def sweep(folder: str | os.PathLike[str], age: int = 0) -> list[str]:
    """Removes what killed writers left in `folder` (not below it): the temporary files of `atomic_write`; their names.

    For who holds the folder's lock, before others of the same job write there. Where there is no lock, only what
    nobody has written to for `age` seconds, longer than any file takes.
    """
    before = time.time() - age
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        files = [e for e in entries if _TEMPORARY.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
        found = [entry for entry in files if not age or entry.stat(follow_symlinks=False).st_mtime < before]
        for entry in found:
            Path(entry.path).unlink(missing_ok=True)
        return sorted(entry.name for entry in found)
    return []


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Makes the folder and writes a block to it, which is removed again. Raises StorageError with the cause."""
    probe = _beside(Path(folder) / "probe")
    with naming(folder):
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(probe, "wb") as file:
                file.write(bytes(4096))  # an empty file fits on a full disk
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def require_apart(out: str | os.PathLike[str], files: Iterable[Path], what: str) -> None:
    """Raises ValueError if a file that is to be written is, under whatever name, one of some that are read. what: they
    are, for the error."""
    if os.path.exists(out) and any(os.path.exists(file) and os.path.samefile(out, file) for file in files):
        raise ValueError(f"--out={out} is {what}, which would be lost; give another name")


def write_json(path: str | os.PathLike[str], value: Any, work: Path | None = None) -> None:
    """Writes `value` as indented JSON with sorted keys, by `atomic_write`; NaN and infinity are errors."""
    with atomic_write(path, work=work) as file:
        json.dump(value, file, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        file.write("\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads JSON; whatever is wrong with it is a ValueError that names the file, and the line where there is one."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
        return found

    data = Path(path).read_bytes()
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not valid JSON (the byte 0x{data[error.start]:02x} is no UTF-8)") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # a key twice, or a number with thousands of digits
        reason = "a number has too many digits" if "set_int_max_str_digits" in str(error) else str(error)
        raise ValueError(f"{path}: not valid JSON ({reason})") from error


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value with a digest of itself, as "sha256"."""
    return {**value, "sha256": sha256_json(dict(value))}


def read_sealed(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `sealed` was given, from a JSON file. Raises FileNotFoundError, and ValueError naming the file if it is not
    what was written; one of older code, without a digest, is taken as it is."""
    try:
        found = read_json(path)
        if not isinstance(found, dict):
            raise TypeError(f"a JSON object is expected, not {type(found).__name__}")
        whole = "sha256" not in found or found.pop("sha256") == sha256_json(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if not whole:
        raise ValueError(f"{path}: damaged (its SHA-256 is not the one that was written)")
    return found


def cache_folder(name: str) -> Path:
    """A folder for what can be made again: $XDG_CACHE_HOME/jaxret/NAME, or that in ~/.cache; nothing is created.
    Raises RuntimeError if there is no home."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "jaxret" / name


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return sha256_bytes(text.encode("utf-8"))


def sha256_json_lists(lists: Iterable[Iterable[Any]]) -> str:
    """`sha256_json` of a list of lists, of which one item is held at a time."""
    encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
    digest = hashlib.sha256(b"[")
    for place, items in enumerate(lists):
        digest.update(b",[" if place else b"[")
        for number, item in enumerate(items):
            digest.update(f"{',' * (number > 0)}{encode(item)}".encode())
        digest.update(b"]")
    digest.update(b"]")
    return digest.hexdigest()
