"""Read a finished folder of vectors, shard by shard, through memory maps."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.shards import (
    MAPPED_ARRAYS,
    SHARD_DTYPES,
    Manifest,
    Shard,
    ShardError,
    check_files,
    plan_shards,
    read_manifest,
)
from jaxret.parallel.progress import with_progress
from jaxret.storage.buckets.working_copy import fetch_files, stored_file
from jaxret.storage.file_state import FileState, file_state
from jaxret.storage.mapped_array import map_array
from jaxret.types import Ragged, SparseRows, word_dtype

FEW_FILES = 64  # number of files that fit into the default limit


class ShardSet:
    """A finished folder of vectors.

    An iteration gives (first row, memory-mapped vectors) of each shard: an array [rows,V,D], or Ragged or SparseRows
    under the layouts "ragged" and "sparse".
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shards = plan_shards(manifest.total_rows, manifest.rows_per_shard)
        self._states: dict[Path, FileState] = {}  # states of files when they were opened

    @property
    def total_rows(self) -> int:
        return self.manifest.total_rows

    @property
    def ragged(self) -> bool:
        """Whether rows have different numbers of dense vectors."""
        return self.manifest.layout == "ragged"

    @property
    def mapped_files(self) -> int:
        """Number of files that stay open while all shards are mapped."""
        return len(self.shards) * (2 if self.sparse else 1)

    @property
    def sparse(self) -> bool:
        """Whether vectors are weights of words."""
        return self.manifest.layout == "sparse"

    @property
    def vectors_per_row(self) -> int:
        """V, the number of vectors of each row. Raises ValueError if rows have different numbers."""
        if self.manifest.vectors_per_row is None:
            raise ValueError(f"{self.folder} has lists of vectors or of words, so rows have different numbers of them")
        return self.manifest.vectors_per_row

    @property
    def dimension(self) -> int:
        return self.manifest.dimension

    @property
    def fingerprint(self) -> dict[str, Any]:
        return self.manifest.fingerprint

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for shard in self.shards:
            yield shard.start, self.map(shard)

    def local(self) -> list[tuple[int, Any]]:
        """Return (number of rows, function that opens the vectors) for each shard whose vectors are on this host."""
        return [
            (shard.rows, partial(self.map, shard))
            for shard in self.shards
            if not any(map(stored_file, self._files(shard)))
        ]

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return the passage ids of n rows, numbered over all shards. One file of ids is read at a time, and only these
        ids are kept."""
        unique, inverse = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        unique_ids: list[str] = []
        for shard, part in self._by_shard(unique):
            self._require_unchanged(shard)
            unique_ids += _read_ids(shard.ids(self.folder), shard, unique[part] - shard.start)
        return [unique_ids[i] for i in inverse]

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[Shard, slice]]:
        """Yield each shard that holds some of the sorted `rows`, with the slice of `rows` that it holds."""
        bounds = np.searchsorted(rows, [shard.start for shard in self.shards] + [self.total_rows])
        for shard, start, stop in zip(self.shards, bounds[:-1], bounds[1:], strict=True):
            if start < stop:
                yield shard, slice(start, stop)

    def check(self, shards: Sequence[Shard], digests: bool) -> None:
        """Fetch the files of shards that are only in a bucket, and verify them."""
        fetch_files(self.folder, [path.name for shard in shards for path in self._files(shard)])
        with ThreadPoolExecutor() as pool:  # digests are computed without the interpreter lock
            checks = pool.map(lambda shard: self.verify(shard, digests), shards)
            list(with_progress(checks, "check shards", len(shards), "shard"))

    def verify(self, shard: Shard, digests: bool) -> None:
        """Raise ShardError if a file of a shard is missing or damaged. Keep the states of its files."""
        self._states |= {path: file_state(path) for path in self._files(shard)}
        check_files(self.folder, shard, self.manifest.shards[shard.index], digests)
        self.map(shard)

    def _files(self, shard: Shard) -> Iterable[Path]:
        return shard.files(self.folder, self.manifest.layout).values()

    def require_unwritten(self, rows: np.ndarray) -> None:
        """Raise ShardError if a mapped file with vectors of these rows was changed in place: a read beyond the end of a
        shortened file would end the process. A mapped file that was replaced by another file is still readable, so this
        is not an error."""
        for shard, _ in self._by_shard(np.unique(rows)):
            for name, path in shard.files(self.folder, self.manifest.layout).items():
                state = file_state(path)
                if name in MAPPED_ARRAYS and state.inode == self._states.get(path, state).inode:
                    self._require_state(path, state)

    def _require_unchanged(self, shard: Shard) -> None:
        """Raise ShardError if a file of a shard changed after it was opened."""
        for path in self._files(shard):
            self._require_state(path, file_state(path))

    def _require_state(self, path: Path, state: FileState) -> None:
        if difference := self._states.get(path, state).difference(state):
            raise ShardError(f"{path} {difference}; open the corpus again, and if that fails, run encode again")

    def map(self, shard: Shard) -> Any:
        """Return the vectors of a shard as memory maps."""
        self._require_unchanged(shard)
        entry = self.manifest.shards[shard.index]
        shape, dtype = entry["shape"], SHARD_DTYPES[entry["dtype"]]
        if self.manifest.layout == "sparse":
            words = _map_array(shard.array(self.folder, "words"), shard, shape[:1], word_dtype(shape[1]).str)
            weights = _map_array(shard.array(self.folder, "weights"), shard, shape[:1], dtype)
            return SparseRows(words, weights, _map_offsets(self.folder, shard, entry, least=0), shape[1])
        vectors = _map_array(shard.array(self.folder, "vectors"), shard, shape, dtype)
        return Ragged(vectors, _map_offsets(self.folder, shard, entry)) if self.manifest.layout == "ragged" else vectors


def open_shards(folder: str | Path, verify: bool = True) -> ShardSet:
    """Open a finished folder of vectors. Check rows, dtype, shapes and sizes, and with `verify` every digest.

    Raises ShardError with the name of a missing or damaged file.
    """
    fetch_files(folder)  # before the manifest is read, so that it describes these files
    shard_set = read_shards(folder)
    shard_set.check(shard_set.shards, verify)
    return shard_set


def read_shards(folder: str | Path) -> ShardSet:
    """Open a finished folder of vectors without a check of its files (`ShardSet.check`). Raises ShardError if encoding
    is not finished."""
    folder = Path(folder)
    path = folder / "manifest.json"
    if not path.is_file():
        state = "encoding is not finished" if any(folder.glob("shard-*.json")) else "nothing was encoded here"
        raise ShardError(f"{path} does not exist: {state}; run encode again")
    return ShardSet(folder, read_manifest(path))


def raise_file_limit(files: int) -> None:
    """Raise this process's limit of open files by `files`, as far as the system allows. Mapped files stay open, but the
    default limit of many systems is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files <= FEW_FILES or soft == resource.RLIM_INFINITY:
        return
    limit = soft + files if hard == resource.RLIM_INFINITY else min(soft + files, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit that it does not report
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _read_ids(path: Path, shard: Shard, rows: np.ndarray) -> list[str]:
    """Return the passage ids of some rows of a shard."""
    text = path.read_bytes()
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    if len(ends) != shard.rows:
        raise ShardError(f"{path} ({shard}): has {len(ends):,} lines for {shard.rows:,} rows; run encode again")
    starts = np.concatenate([[0], ends[:-1] + 1])
    try:
        return [text[starts[row] : ends[row]].decode("utf-8") for row in rows]
    except UnicodeDecodeError as error:
        raise ShardError(f"{path} ({shard}): is not UTF-8; run encode again") from error


def _map(path: Path) -> np.ndarray:
    try:
        return map_array(path)
    except (OSError, ValueError, TypeError, OverflowError, EOFError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise OSError(f"{path}: the limit of open files is reached; raise it (ulimit -n)") from error
        raise ShardError(f"{path}: cannot be read ({error}); run encode again") from error


def _map_array(path: Path, shard: Shard, shape: list[int], dtype: str) -> np.ndarray:
    array = _map(path)
    if list(array.shape) != shape or array.dtype != np.dtype(dtype):
        raise ShardError(
            f"{path} ({shard}): holds {array.dtype} {list(array.shape)}, its manifest says {np.dtype(dtype)} "
            f"{shape}; run encode again"
        )
    return array


def _map_offsets(folder: Path, shard: Shard, entry: Mapping[str, Any], least: int = 1) -> np.ndarray:
    """Return the offsets of each row's vectors or words [rows + 1]. Each row must have at least `least` of them."""
    path = shard.array(folder, "offsets")
    offsets = _map(path)
    if offsets.shape == (shard.rows + 1,) and offsets.dtype == np.int64:
        offsets = np.array(offsets)
        if offsets[0] == 0 and offsets[-1] == entry["shape"][0] and (np.diff(offsets) >= least).all():
            return offsets
    items = "vectors" if least else "words"
    raise ShardError(
        f"{path} ({shard}): does not divide {entry['shape'][0]} {items} into {shard.rows} rows; run encode again"
    )
