"""Columns of numbers on disk that are made once, then memory-mapped; and believed only while they are what they say.

<folder>/NAME.npy        one file a column; a Ragged is two, NAME.flat.npy and NAME.offsets.npy
         manifest.json   written last: the recipe, and digests of the files read and of the columns

One process makes it, by a lease (`leases.py`), and the others wait; of one that died the work is taken over.

Opening a store compares the manifest with its own digest, the files it was made from by size and time (and by digest,
where these differ: a file that was copied or touched is the same), and every column with its digest: all of it is read
once, at 1.6 GiB/s where it is in memory, and the pages that training will ask for are then in memory. What is not
believed is made again, and why is said. A store may be deleted at any time.
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

from jaxret.data.files import Where
from jaxret.leases import Lease, Leases
from jaxret.storage import (
    StorageError,
    atomic_write,
    cache_folder,
    naming,
    read_sealed,
    sealed,
    sha256_file,
    sha256_json,
    sweep,
    write_json,
)
from jaxret.types import Ragged

FORMAT = 1  # of the folder, and of what code makes of text: with another number every store is made again
PAUSE = 0.2  # seconds between two looks at what another process does
Say = Callable[[str], None]


class StaleError(ValueError):
    """There is no such store, or it is not to be believed; the text says why."""


@dataclass(frozen=True)
class Origin:
    """What a store is made from: files, and (JSON) how they are read. `name` is for people who look into the folder."""

    name: str
    files: tuple[Path, ...]
    recipe: dict[str, Any]

    def folder(self, root: Path) -> Path:
        """Where the store is: the same files, read in the same way, have one folder, whatever is in the files."""
        named = [str(path.absolute()) for path in self.files]
        return root / f"{self.name}-{sha256_json([FORMAT, named, self.recipe])[:16]}"

    def state(self) -> dict[str, dict[str, Any]]:
        """Path -> size, time of change (nanoseconds) and digest of each file."""
        return {str(path.absolute()): {**_stat(path), "sha256": sha256_file(path)} for path in self.files}

    def changed(self, state: Mapping[str, Mapping[str, Any]]) -> Path | None:
        """The first file that is not as in `state`; it is digested only if its size or time say so."""
        for path in self.files:
            entry = state[str(path.absolute())]
            same = _stat(path) == {key: entry[key] for key in ("bytes", "modified")}
            if not same and sha256_file(path) != entry["sha256"]:
                return path
        return None


def _stat(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"bytes": found.st_size, "modified": found.st_mtime_ns}


@dataclass(frozen=True)
class Strings(Sequence[str]):
    """Many texts in one array of UTF-8 bytes; a text is made when it is asked for."""

    encoded: Ragged  # flat: uint8

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return self.encoded[range(len(self))[place]].tobytes().decode()


class StringsBuilder:
    """Texts, added one at a time."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._joined, self._ends = bytearray(), array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self._joined += text.encode()
        self._ends.append(len(self._joined))

    def strings(self) -> Strings:
        return Strings(Ragged(np.frombuffer(bytes(self._joined), np.uint8), np.array(self._ends, np.int64)))


@dataclass(frozen=True)
class Store:
    """A finished store. Its columns are memory-mapped: they take pages that the system takes back when it needs them.
    `facts` are what its maker noted."""

    folder: Path
    facts: dict[str, Any]
    columns: Mapping[str, np.ndarray] = field(repr=False)

    def ragged(self, name: str) -> Ragged:
        return Ragged(self.columns[f"{name}.flat"], self.columns[f"{name}.offsets"])

    def strings(self, name: str) -> Strings:
        return Strings(self.ragged(name))

    @property
    def size(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())


@dataclass
class Writer:
    """Writes columns into a folder, and remembers what they are. work: where a file is until it is whole."""

    folder: Path
    work: Path | None = None
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)

    def array(self, name: str, values: np.ndarray) -> np.ndarray:
        """Writes a column; memory-mapped."""
        return self._column(name, values.dtype, values.shape[1:], [values])

    def ragged(self, name: str, blocks: Iterable[Ragged], dtype: Any = np.int32) -> Ragged:
        """Writes the rows of all blocks, which are held one at a time; memory-mapped."""
        lengths = array("q")

        def flat() -> Iterator[np.ndarray]:
            for block in blocks:
                lengths.frombytes(block.lengths.tobytes())
                yield block.flat

        written = self._column(f"{name}.flat", np.dtype(dtype), (), flat())
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
        return Ragged(written, self.array(f"{name}.offsets", offsets))

    def strings(self, name: str, texts: Strings) -> None:
        self.ragged(name, [texts.encoded], np.uint8)

    def _column(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[np.ndarray]
    ) -> np.ndarray:
        """Writes NAME.npy, whose rows come in blocks: the header is written again when their number is known."""
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
        return _mapped(path)


def _write_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.tell()


def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))  # a plain array: its rows are cut out faster


def open_store(origin: Origin, root: Path) -> Store:
    """The store in its folder, every column of which was read and is what was written. Raises StaleError."""
    folder = origin.folder(root)
    try:
        manifest = read_sealed(folder / "manifest.json")
        columns, facts = manifest["columns"], manifest["facts"]
        same = (manifest["format"], manifest["recipe"]) == (FORMAT, origin.recipe)
        changed = origin.changed(manifest["files"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StaleError("") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StaleError(f"{folder}/manifest.json is damaged") from error
    if not same:
        raise StaleError(f"{folder} was made in another way")
    if changed:
        raise StaleError(f"{changed} has changed since it was tokenised")

    def sound(name: str) -> bool:
        path = folder / f"{name}.npy"
        with contextlib.suppress(OSError):
            return path.stat().st_size == columns[name]["bytes"] and sha256_file(path) == columns[name]["sha256"]
        return False

    with ThreadPoolExecutor() as threads:
        for name, whole in zip(columns, threads.map(sound, columns)):
            if not whole:
                raise StaleError(f"{folder}/{name}.npy is damaged")
    return Store(folder, facts, {name: _mapped(folder / f"{name}.npy") for name in columns})


def stored(origin: Origin, root: Path, make: Callable[[Writer], dict[str, Any]], say: Say) -> Store:
    """The store of `origin` under `root`; if there is none to be believed, `make` writes its columns and returns its
    facts (JSON). What is done is said.

    Of several processes that ask for it, one makes it and the others wait. One that is killed leaves nothing that is
    believed. Raises what `make` raises, DataError if a file changes meanwhile, and StorageError if the folder cannot be
    written.
    """
    with contextlib.suppress(StaleError):
        return open_store(origin, root)
    with Leases(root) as leases:
        while True:
            lease = _lease(leases, origin, root, say)
            try:
                return open_store(origin, root)
            except StaleError as stale:
                if str(stale):
                    say(f"{stale}: its tokens are made again")
            if lease.publishes(partial(_make, origin, root, make, lease)):
                break
            leases.release(lease)
        store = open_store(origin, root)
    say(f"tokens of {origin.name} are kept in {store.folder} ({store.size / 1e6:,.1f} MB)")
    return store


def _lease(leases: Leases, origin: Origin, root: Path, say: Say) -> Lease:
    """That of a store; waits for who has it, which is said once."""
    name = origin.folder(root).name
    try:
        with naming(root):
            root.mkdir(parents=True, exist_ok=True)
        while not (lease := leases.claim(name)):
            say(f"  waiting for another process: the tokens of {origin.name} are made by {leases.holder(name)}")
            say = _silent
            time.sleep(PAUSE)
    except StorageError as error:
        remedy = "tokens are kept there; name another folder with data.store (jaxret encode: --store)"
        raise StorageError(f"{error}; {remedy}") from error
    return lease


def _make(origin: Origin, root: Path, make: Callable[[Writer], dict[str, Any]], lease: Lease) -> None:
    folder = origin.folder(root)
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        _clear(folder)
        state, writer = origin.state(), Writer(folder, lease.work)
        facts = make(writer)
        if changed := origin.changed(state):
            remedy = "leave it alone, and start again"
            raise Where(changed).error("changed file", "the file changed while it was read", remedy)
        found = {"format": FORMAT, "recipe": origin.recipe, "files": state, "columns": writer.columns, "facts": facts}
        write_json(folder / "manifest.json", sealed(found), lease.work)
    except BaseException:
        if lease.held:  # else it is another's
            _clear(folder)
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing was written
        raise


def _clear(folder: Path) -> None:
    """Removes what a killed process left, and what is not believed: first that by which it would be."""
    sweep(folder)
    for path in [folder / "manifest.json", *folder.glob("*.npy")]:
        path.unlink(missing_ok=True)


def _silent(_: str) -> None:
    pass


def store_root(given: str = "") -> Path:
    """The folder of all stores: the one given, or the user's cache. Raises ValueError if there is no home to keep one
    in."""
    try:
        return Path(given).absolute() if given else cache_folder("tokens")
    except RuntimeError as error:
        raise ValueError(f"there is no folder to keep tokens in ({error}); name one with data.store") from error
