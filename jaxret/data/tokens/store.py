"""Token stores: columns of numbers on disk that are made once, verified, then memory-mapped.

<folder>/NAME.npy        one file per column; a Ragged has two, NAME.flat.npy and NAME.offsets.npy
         manifest.json   written last: the settings, and digests of the source files and of the columns

One process makes a store under a lease (`leases.py`) while other processes wait. If it dies, another process takes
over.

Opening a store verifies the manifest by its own digest and every column by its digest. A source file is unchanged if
its size and time are; if not, its digest decides, so that a file may be copied or touched. The verification reads all
columns once, at 1.6 GiB/s if they are in memory, and so loads the pages that training needs. A store that fails
verification is created again, and the reason is logged. A store may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.errors import Location
from jaxret.data.formats import stat_files
from jaxret.storage.atomic import (
    StorageError,
    atomic_write,
    cache_folder,
    read_with_digest,
    require_disk_path,
    sha256_file,
    sha256_json,
    storage_errors,
    with_digest,
    write_json,
)
from jaxret.storage.cache import mark_used, trim_cache
from jaxret.storage.leases import Lease, Leases
from jaxret.storage.mapped_array import map_array
from jaxret.storage.unfinished import remove_leftovers
from jaxret.types import Log, Ragged

FORMAT = 1  # version of the folder and of tokenization: after a change of this number all stores are created again
_PAUSE = 0.2  # seconds between two checks whether another process has finished


class StaleError(ValueError):
    """The store does not exist or cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class StoreOrigin:
    """Files that a store is made from, and how they are read."""

    name: str  # Readable part of the folder's name
    files: tuple[Path, ...]  # Source files
    settings: dict[str, Any]  # Settings (JSON) that the columns depend on

    def folder(self, root: Path) -> Path:
        """Return the store's folder. Its name depends on paths and settings, not on the content of files."""
        paths = [str(path.absolute()) for path in self.files]
        return root / f"{self.name}-{sha256_json([FORMAT, paths, self.settings])[:16]}"

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the size, modification time (nanoseconds) and digest of each file, by path."""
        return {str(path.absolute()): {**stat_files([path]), "sha256": sha256_file(path)} for path in self.files}

    def changed(self, state: Mapping[str, Mapping[str, Any]]) -> Path | None:
        """Return the first file that differs from `state`, or None.

        A file is digested only if its size or time differs.
        """
        for path in self.files:
            entry = state[str(path.absolute())]
            stat = {key: entry[key] for key in ("bytes", "modified")}
            if stat_files([path]) != stat and sha256_file(path) != entry["sha256"]:
                return path
        return None


@dataclass(frozen=True)
class Strings(Sequence[str]):
    """Sequence of texts in one array of UTF-8 bytes. An access decodes one text."""

    utf8: Ragged  # flat: uint8

    def __len__(self) -> int:
        return len(self.utf8)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.utf8[range(len(self))[index]].tobytes().decode()


class StringsBuilder:
    """Builds `Strings` from texts that are added one at a time."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self._bytes += text.encode()
        self._ends.append(len(self._bytes))

    def strings(self) -> Strings:
        return Strings(Ragged(np.frombuffer(bytes(self._bytes), np.uint8), np.array(self._ends, np.int64)))


@dataclass(frozen=True)
class TokenStore:
    """A finished store. Its columns are memory-mapped: the system can reclaim their pages when it needs memory.

    `facts` are the values (JSON) that `make` returned when the store was made.
    """

    folder: Path
    facts: dict[str, Any]
    columns: Mapping[str, np.ndarray] = field(repr=False)

    def ragged(self, name: str) -> Ragged:
        """Return a column of rows of different lengths, memory-mapped. Raises KeyError for a column that the store
        lacks."""
        return Ragged(self.columns[f"{name}.flat"], self.columns[f"{name}.offsets"])

    def strings(self, name: str) -> Strings:
        """Return a column of texts, memory-mapped. Raises KeyError for a column that the store lacks."""
        return Strings(self.ragged(name))

    @property
    def size(self) -> int:
        """Size of all columns in bytes."""
        return sum(column.nbytes for column in self.columns.values())


@dataclass
class ColumnWriter:
    """Writes columns into a folder and records their sizes and digests.

    `work` is the folder for unfinished files; None means `folder`.
    """

    folder: Path
    work: Path | None = None
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)

    def array(self, name: str, values: np.ndarray) -> np.ndarray:
        """Write a column and return it, memory-mapped."""
        return self._column(name, values.dtype, values.shape[1:], [values])

    def ragged(self, name: str, blocks: Iterable[Ragged], dtype: Any = np.int32) -> Ragged:
        """Write the rows of all blocks and return them, memory-mapped. One block at a time is held in memory."""
        lengths = array("q")

        def flat() -> Iterator[np.ndarray]:
            for block in blocks:
                lengths.frombytes(block.lengths.tobytes())
                yield block.flat

        values = self._column(f"{name}.flat", np.dtype(dtype), (), flat())
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
        return Ragged(values, self.array(f"{name}.offsets", offsets))

    def strings(self, name: str, texts: Strings) -> None:
        """Write a column of texts."""
        self.ragged(name, [texts.utf8], np.uint8)

    def _column(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[np.ndarray]
    ) -> np.ndarray:
        """Write NAME.npy from blocks of rows, and return the column, memory-mapped. The header is rewritten when the
        number of rows is known."""
        path, rows = self.folder / f"{name}.npy", 0
        dtype = dtype.newbyteorder("<")  # the bytes are the same on every machine
        with atomic_write(path, "wb", self.work) as file:
            start = _write_header(file, dtype, (0, *shape))
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype).data)
                rows += len(block)
            file.seek(0)
            if _write_header(file, dtype, (rows, *shape)) != start:
                raise AssertionError("numpy leaves room in the header for the number of rows")
        self.columns[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        return np.asarray(map_array(path))


def _write_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def open_store(origin: StoreOrigin, root: Path) -> TokenStore:
    """Open the store of `origin` and verify every column. Raises StaleError if it cannot be used."""
    folder = origin.folder(root)
    try:
        manifest = read_with_digest(folder / "manifest.json")
        columns, facts = manifest["columns"], manifest["facts"]
        is_current = (manifest["format"], manifest["recipe"]) == (FORMAT, origin.settings)
        changed_file = origin.changed(manifest["files"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StaleError("") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StaleError(f"{folder}/manifest.json is damaged") from error
    if not is_current:
        raise StaleError(f"{folder} was made by another version or with other settings")
    if changed_file:
        raise StaleError(f"{changed_file} has changed since it was tokenized")

    def is_sound(name: str) -> bool:
        path = folder / f"{name}.npy"
        with contextlib.suppress(OSError):
            return path.stat().st_size == columns[name]["bytes"] and sha256_file(path) == columns[name]["sha256"]
        return False

    with ThreadPoolExecutor() as threads:
        for name, sound in zip(columns, threads.map(is_sound, columns)):
            if not sound:
                raise StaleError(f"{folder}/{name}.npy is damaged")
    mark_used(folder)
    return TokenStore(folder, facts, {name: np.asarray(map_array(folder / f"{name}.npy")) for name in columns})


def open_or_make_store(
    origin: StoreOrigin, root: Path, make: Callable[[ColumnWriter], dict[str, Any]], log: Log
) -> TokenStore:
    """Open the store of `origin`, or make it if no valid one exists.

    If several processes need the same store, one makes it and the others wait. Files of a killed process do not pass
    verification.

    Args:
        origin: source files and settings.
        root: folder of all stores.
        make: function that writes the columns and returns facts (JSON) to store with them.
        log: function for messages about waiting, making a store again and writing.

    Raises:
        DataError: a source file changed while it was read.
        StorageError: the folder cannot be written.
        Exception: any exception of `make`.
    """
    with contextlib.suppress(StaleError):
        return open_store(origin, root)
    with Leases(root) as leases:
        while True:
            lease = _lease(leases, origin, root, log)
            try:
                return open_store(origin, root)
            except StaleError as stale:
                if str(stale):
                    log(f"{stale}: it is tokenized again")
            if lease.publish(partial(_make, origin, root, make, lease)):
                break
            leases.release(lease)
        store = open_store(origin, root)
    log(f"tokens of {origin.name} are kept in {store.folder} ({store.size / 1e6:,.1f} MB)")
    if _is_in_cache(root):
        for entry in trim_cache(root, "tokens"):
            log(f"  deleted {entry.path.name} ({entry.size / 1e6:,.1f} MB), the least recently used (jaxret cache)")
    return store


def _lease(leases: Leases, origin: StoreOrigin, root: Path, log: Log) -> Lease:
    """Claim the lease of a store. Wait while another process holds it, and log that once."""
    name = origin.folder(root).name
    try:
        with storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        while not (lease := leases.claim(name)):
            log(f"  waiting for another process: the tokens of {origin.name} are made by {leases.holder(name)}")
            log = _silent
            time.sleep(_PAUSE)
    except StorageError as error:
        remedy = "this is the folder of tokens; name another folder with data.store (jaxret encode: --store)"
        raise StorageError(f"{error}; {remedy}") from error
    return lease


def _make(origin: StoreOrigin, root: Path, make: Callable[[ColumnWriter], dict[str, Any]], lease: Lease) -> None:
    folder = origin.folder(root)
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        _clear(folder)
        state, writer = origin.state(), ColumnWriter(folder, lease.work)
        facts = make(writer)
        if changed_file := origin.changed(state):
            remedy = "do not change it during a job, and start again"
            raise Location(changed_file).error("changed file", "the file changed while it was read", remedy)
        manifest = {
            "format": FORMAT,
            "recipe": origin.settings,
            "files": state,
            "columns": writer.columns,
            "facts": facts,
        }
        write_json(folder / "manifest.json", with_digest(manifest), lease.work)
    except BaseException:
        if lease.is_held:  # otherwise another process has taken the work over
            _clear(folder)
            if is_new:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing was written
        raise


def _clear(folder: Path) -> None:
    """Remove the files of a killed process and invalid columns. The manifest goes first, because it makes a store
    valid."""
    remove_leftovers(folder)
    for path in [folder / "manifest.json", *folder.glob("*.npy")]:
        path.unlink(missing_ok=True)


def _silent(_: str) -> None:
    pass


def _is_in_cache(root: Path) -> bool:
    """Return whether stores are in the user's cache. The cache is trimmed to a size; other folders are not."""
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        return root == cache_folder("tokens")
    return False


def store_root(folder: str = "") -> Path:
    """Return the folder of all stores: `folder`, or by default one in the user's cache.

    Raises ValueError if the user has no home folder, and for an address that is not a path on a disk.
    """
    require_disk_path(folder)
    try:
        return Path(folder).absolute() if folder else cache_folder("tokens")
    except RuntimeError as error:
        raise ValueError(f"there is no folder to keep tokens in ({error}); name one with data.store") from error
