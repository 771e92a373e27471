"""Vectors on disk: shards that are whole or not there, written in any order, read through memory maps.

    vectors-00000-of-00064.npy   [rows, V, D] float32 or float16
    ids-00000-of-00064.txt       the passage id of each row
    shard-00000-of-00064.json    written last: sizes and digests of the two files, and what they were made from
    manifest.json                written when every shard is there

A document with its own number of vectors (ColBERT without padding) would be another `layout` in the manifest, with a
file of offsets a shard; this module knows the layout "fixed" only: V vectors for every document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxret.contract import require_equal
from jaxret.storage import atomic_write, read_json, sha256_file, write_json

LAYOUT = "fixed"
DTYPES = {"float32": "<f4", "float16": "<f2"}  # little-endian, so that the bytes are the same on every machine


class ShardError(ValueError):
    """A file of vectors or ids is missing, damaged or not what its manifest says."""


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of the corpus: shard `index` of `count`."""

    index: int
    count: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def suffix(self) -> str:
        return f"{self.index:05d}-of-{self.count:05d}"

    def vectors(self, folder: Path) -> Path:
        return folder / f"vectors-{self.suffix}.npy"

    def ids(self, folder: Path) -> Path:
        return folder / f"ids-{self.suffix}.txt"

    def sidecar(self, folder: Path) -> Path:
        return folder / f"shard-{self.suffix}.json"


@dataclass(frozen=True)
class Manifest:
    """What a folder of vectors holds; `shards` are the entries of the sidecars, first rows first."""

    total_rows: int
    rows_per_shard: int
    vectors_per_row: int  # V
    dimension: int  # D
    dtype: str
    shards: list[dict[str, Any]]
    fingerprint: dict[str, Any]
    layout: str = LAYOUT


def plan_shards(total_rows: int, rows_per_shard: int) -> list[Shard]:
    """Cuts a corpus into shards; only the last may be short. Depends on nothing but the two numbers."""
    if total_rows < 1 or rows_per_shard < 1:
        raise ValueError(f"cannot cut {total_rows} rows into shards of {rows_per_shard}: both must be at least 1")
    starts = range(0, total_rows, rows_per_shard)
    return [Shard(i, len(starts), start, min(start + rows_per_shard, total_rows)) for i, start in enumerate(starts)]


class ShardWriter:
    """Writes the shards of one corpus into `folder`, in any order, from any number of processes.

    `fingerprint` is a nested JSON mapping of everything the bytes depend on. Opening a folder whose shards have
    another fingerprint or other boundaries raises ContractError.
    """

    def __init__(self, folder: Path, total_rows: int, rows_per_shard: int, fingerprint: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.shards = plan_shards(total_rows, rows_per_shard)
        self.made_from = {
            "total_rows": total_rows,
            "rows_per_shard": rows_per_shard,
            "fingerprint": json.loads(json.dumps(fingerprint, allow_nan=False)),  # as it will be read back
        }
        self._whole: set[int] = set()  # shards whose digests this process has seen to be right
        for path in [self.folder / "manifest.json", *sorted(self.folder.glob("shard-*.json"))]:
            found = _read_entry(path)
            if found is not None and found.keys() >= self.made_from.keys():
                require_equal(
                    self.made_from,
                    {key: found[key] for key in self.made_from},
                    "what is to be encoded now",
                    str(path),
                    f"Delete {self.folder} to encode again, or choose another name for this corpus.",
                )

    def pending(self) -> list[Shard]:
        """The shards still to write: those without a sidecar, or whose files do not match it."""
        return [shard for shard in self.shards if not self._is_whole(shard)]

    def write(self, shard: Shard, vectors: np.ndarray, ids: Sequence[str]) -> None:
        """Writes one shard: `vectors` [rows,V,D] float32 or float16, and the passage id of each row."""
        vectors = np.asarray(vectors)
        dtype = _check_vectors(shard, vectors)
        _check_ids(shard, ids)
        (self.folder / "manifest.json").unlink(missing_ok=True)  # it describes the shards that were there before
        self._whole.discard(shard.index)
        with atomic_write(shard.vectors(self.folder), "wb") as file:
            np.save(file, np.ascontiguousarray(vectors, DTYPES[dtype]), allow_pickle=False)
        with atomic_write(shard.ids(self.folder)) as file:
            file.writelines(f"{identifier}\n" for identifier in ids)
        entry = {
            "first_row": shard.start,
            "rows": shard.rows,
            "shape": list(vectors.shape),
            "dtype": dtype,
            "vectors": _describe(shard.vectors(self.folder)),
            "ids": _describe(shard.ids(self.folder)),
        }
        write_json(shard.sidecar(self.folder), entry | self.made_from)
        self._whole.add(shard.index)

    def finish(self) -> Manifest:
        """Writes the manifest. Raises ShardError naming the shards that are missing or differ in shape."""
        missing = self.pending()
        if missing:
            names = ", ".join(shard.suffix for shard in missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ShardError(
                f"{self.folder}: {len(missing)} of {len(self.shards)} shards are missing or damaged ({names}): "
                "run encode again to write them"
            )
        keys = ("first_row", "rows", "shape", "dtype", "vectors", "ids")
        entries = [read_json(shard.sidecar(self.folder)) for shard in self.shards]
        first = entries[0]
        for shard, entry in zip(self.shards, entries, strict=True):
            if (entry["shape"][1:], entry["dtype"]) != (first["shape"][1:], first["dtype"]):
                raise ShardError(
                    f"{shard.vectors(self.folder)}: {entry['dtype']} {entry['shape']}, but the first shard is "
                    f"{first['dtype']} {first['shape']}: V, D and dtype must be the same in every shard"
                )
        _, vectors_per_row, dimension = first["shape"]
        manifest = Manifest(
            vectors_per_row=vectors_per_row,
            dimension=dimension,
            dtype=first["dtype"],
            shards=[{key: entry[key] for key in keys} for entry in entries],
            **self.made_from,
        )
        path = self.folder / "manifest.json"
        if _read_entry(path) != vars(manifest):
            write_json(path, vars(manifest))
        return manifest

    def _is_whole(self, shard: Shard) -> bool:
        sidecar = shard.sidecar(self.folder)
        entry = _read_entry(sidecar)
        if entry is None or any(entry.get(key) != value for key, value in self.made_from.items()):
            return False
        if entry.get("first_row") != shard.start or entry.get("rows") != shard.rows:
            return False
        try:
            _check_files(self.folder, shard, entry, verify=shard.index not in self._whole)
        except ShardError:
            return False  # pending() lists it, and it is written again
        self._whole.add(shard.index)
        return True


class ShardSet:
    """A finished folder of vectors. Iterating gives (first_row, vectors [rows,V,D]) memory maps, shard by shard."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shards = plan_shards(manifest.total_rows, manifest.rows_per_shard)

    @property
    def total_rows(self) -> int:
        return self.manifest.total_rows

    @property
    def vectors_per_row(self) -> int:
        return self.manifest.vectors_per_row

    @property
    def dimension(self) -> int:
        return self.manifest.dimension

    @property
    def fingerprint(self) -> dict[str, Any]:
        return self.manifest.fingerprint

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for shard in self.shards:
            yield shard.start, self._map(shard)

    def rows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors [n,V,D] of n global rows, in the dtype on disk."""
        unique, inverse = self._unique(indices)
        shape = (len(unique), self.vectors_per_row, self.dimension)
        vectors = np.empty(shape, DTYPES[self.manifest.dtype])
        for shard, part in self._by_shard(unique):
            vectors[part] = self._map(shard)[unique[part] - shard.start]
        return vectors[inverse]

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The passage ids of n global rows. Reads one id file at a time and keeps the ids asked for only."""
        unique, inverse = self._unique(indices)
        found: list[str] = []
        for shard, part in self._by_shard(unique):
            text = shard.ids(self.folder).read_bytes()
            ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
            starts = np.concatenate([[0], ends[:-1] + 1])
            found += [text[starts[row] : ends[row]].decode("utf-8") for row in unique[part] - shard.start]
        return [found[i] for i in inverse]

    def _unique(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.asarray(indices, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.total_rows):
            wrong = rows[(rows < 0) | (rows >= self.total_rows)][0]
            raise IndexError(f"{self.folder}: row {wrong} is outside 0 to {self.total_rows - 1}")
        unique, inverse = np.unique(rows, return_inverse=True)
        return unique, inverse

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[Shard, slice]]:
        """The shards that hold any of the sorted `rows`, and which part of `rows` each holds."""
        bounds = np.searchsorted(rows, [shard.start for shard in self.shards] + [self.total_rows])
        for shard, start, stop in zip(self.shards, bounds[:-1], bounds[1:], strict=True):
            if start < stop:
                yield shard, slice(start, stop)

    def _map(self, shard: Shard) -> np.ndarray:
        return _map_vectors(self.folder, shard, self.manifest.shards[shard.index])


def open_shards(folder: str | Path, verify: bool = True) -> ShardSet:
    """Opens a finished folder of vectors. Checks rows, dtype, shapes and sizes, and with `verify` every digest.

    Raises ShardError naming the file that is missing or damaged.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if not path.is_file():
        state = "encoding is not finished" if any(folder.glob("shard-*.json")) else "nothing was encoded here"
        raise ShardError(f"{path} does not exist: {state}; run encode again")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("layout") != LAYOUT or set(found) != set(Manifest.__annotations__):
        raise ShardError(f"{path}: not a manifest with layout {LAYOUT!r} of this version; run encode again")
    manifest = Manifest(**found)
    shards = plan_shards(manifest.total_rows, manifest.rows_per_shard)
    if len(shards) != len(manifest.shards):
        raise ShardError(f"{path}: lists {len(manifest.shards)} shards, {len(shards)} are right; run encode again")

    def check(shard: Shard) -> None:
        entry = manifest.shards[shard.index]
        expected = [shard.rows, manifest.vectors_per_row, manifest.dimension]
        if (entry["first_row"], entry["shape"], entry["dtype"]) != (shard.start, expected, manifest.dtype):
            raise ShardError(f"{path}: the entry of shard {shard.suffix} contradicts the totals; run encode again")
        _check_files(folder, shard, entry, verify)
        _map_vectors(folder, shard, entry)

    with ThreadPoolExecutor() as pool:  # digests leave the interpreter lock alone
        list(pool.map(check, shards))
    return ShardSet(folder, manifest)


def _map_vectors(folder: Path, shard: Shard, entry: Mapping[str, Any]) -> np.ndarray:
    path = shard.vectors(folder)
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path}: cannot be read ({error}); run encode again") from error
    if list(vectors.shape) != entry["shape"] or vectors.dtype != np.dtype(DTYPES[entry["dtype"]]):
        raise ShardError(
            f"{path}: holds {vectors.dtype} {list(vectors.shape)}, its manifest says {entry['dtype']} "
            f"{entry['shape']}; run encode again"
        )
    return cast(np.ndarray, vectors)


def _check_files(folder: Path, shard: Shard, entry: Mapping[str, Any], verify: bool) -> None:
    for kind, path in (("vectors", shard.vectors(folder)), ("ids", shard.ids(folder))):
        expected = entry.get(kind)
        if not isinstance(expected, dict) or set(expected) != {"bytes", "sha256"}:
            raise ShardError(
                f"{folder}: the entry of shard {shard.suffix} says nothing of its {kind}; run encode again"
            )
        if not path.is_file():
            raise ShardError(f"{path} does not exist; run encode again")
        if path.stat().st_size != expected["bytes"]:
            raise ShardError(f"{path}: {path.stat().st_size} bytes, {expected['bytes']} were written; run encode again")
        if verify and sha256_file(path) != expected["sha256"]:
            raise ShardError(f"{path}: damaged (its SHA-256 is not the one that was written); run encode again")


def _check_vectors(shard: Shard, vectors: np.ndarray) -> str:
    if vectors.ndim != 3 or vectors.shape[0] != shard.rows or 0 in vectors.shape:
        raise ValueError(f"shard {shard.suffix} wants vectors [{shard.rows},V,D], got {list(vectors.shape)}")
    dtype = vectors.dtype.name
    if dtype not in DTYPES:
        raise ValueError(f"shard {shard.suffix} has {dtype} vectors; they must be one of {', '.join(DTYPES)}")
    finite = np.isfinite(vectors).all(axis=(1, 2))
    if not finite.all():
        hint = "; float16 holds nothing above 65504, so try encode.dtype=float32" if dtype == "float16" else ""
        raise ValueError(f"row {shard.start + int(finite.argmin())} has a NaN or an infinity in its vectors{hint}")
    return dtype


def _check_ids(shard: Shard, ids: Sequence[str]) -> None:
    if len(ids) != shard.rows:
        raise ValueError(f"shard {shard.suffix} has {shard.rows} rows, but {len(ids)} ids were given")
    for row, identifier in enumerate(ids, shard.start):
        if identifier.split() != [identifier]:
            raise ValueError(f"row {row} has the id {identifier!r}; an id is not empty and has no white space")


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _read_entry(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file, or None if it is missing or broken, which means the same: not done."""
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
