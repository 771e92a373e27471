"""Vectors on disk: shards that are whole or not there, written in any order, read through memory maps.

vectors-00000-of-00064.npy   layout "fixed": [rows, V, D]; "ragged": [vectors, D]; float32 or float16
offsets-00000-of-00064.npy   layout "ragged" alone: int64 [rows + 1], where the vectors of each row begin and end
ids-00000-of-00064.txt       the passage id of each row
shard-00000-of-00064.json    written last: sizes and digests of the files, and what they were made from
manifest.json                written when every shard is there
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.contract import require_equal
from jaxret.storage import atomic_write, read_json, sha256_file, write_json
from jaxret.types import VECTOR_DTYPES, Ragged

LAYOUTS = ("fixed", "ragged")  # V vectors for every row, or each row its own number
# Little-endian, so that the bytes are the same on every machine.
DTYPES = {name: np.dtype(name).newbyteorder("<").str for name in VECTOR_DTYPES}


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

    def offsets(self, folder: Path) -> Path:
        return folder / f"offsets-{self.suffix}.npy"

    def files(self, folder: Path, layout: str) -> dict[str, Path]:
        """What a shard consists of, by the name of its entry in the sidecar."""
        files = {"vectors": self.vectors(folder), "ids": self.ids(folder)}
        return files | {"offsets": self.offsets(folder)} if layout == "ragged" else files

    def sidecar(self, folder: Path) -> Path:
        return folder / f"shard-{self.suffix}.json"


@dataclass(frozen=True)
class Manifest:
    """What a folder of vectors holds; `shards` are the entries of the sidecars, first rows first."""

    total_rows: int
    rows_per_shard: int
    vectors_per_row: int | None  # V; None under "ragged"
    dimension: int  # D
    dtype: str
    shards: list[dict[str, Any]]
    fingerprint: dict[str, Any]
    layout: str


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
            found = read_entry(path)
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

    def write(self, shard: Shard, vectors: np.ndarray | Ragged, ids: Sequence[str]) -> None:
        """Writes one shard: `vectors` [rows,V,D] float32 or float16, or a list of vectors for each row; and the passage
        id of each row."""
        layout = "ragged" if isinstance(vectors, Ragged) else "fixed"
        flat = vectors.flat if isinstance(vectors, Ragged) else np.asarray(vectors)
        dtype = _check_vectors(shard, vectors, flat)
        _check_ids(shard, ids)
        (self.folder / "manifest.json").unlink(missing_ok=True)  # it describes the shards that were there before
        self._whole.discard(shard.index)
        with atomic_write(shard.vectors(self.folder), "wb") as file:
            np.save(file, np.ascontiguousarray(flat, DTYPES[dtype]), allow_pickle=False)
        if isinstance(vectors, Ragged):
            with atomic_write(shard.offsets(self.folder), "wb") as file:
                np.save(file, np.ascontiguousarray(vectors.offsets, "<i8"), allow_pickle=False)
        with atomic_write(shard.ids(self.folder)) as file:
            file.writelines(f"{identifier}\n" for identifier in ids)
        entry = {
            "first_row": shard.start,
            "rows": shard.rows,
            "layout": layout,
            "shape": list(flat.shape),
            "dtype": dtype,
            **{name: _describe(path) for name, path in shard.files(self.folder, layout).items()},
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
        entries = [read_json(shard.sidecar(self.folder)) for shard in self.shards]
        layout, dtype = entries[0]["layout"], entries[0]["dtype"]
        fixed = slice(1, None) if layout == "fixed" else slice(-1, None)  # what all shards share: (V, D) or (D,)
        same = (layout, dtype, entries[0]["shape"][fixed])
        for shard, entry in zip(self.shards, entries, strict=True):
            if (entry["layout"], entry["dtype"], entry["shape"][fixed]) != same:
                raise ShardError(
                    f"{shard.vectors(self.folder)}: {entry['dtype']} {entry['shape']} {entry['layout']}, but the first "
                    f"shard is {dtype} {entries[0]['shape']} {layout}: V, D and dtype must be the same in every shard"
                )
        manifest = Manifest(
            vectors_per_row=same[2][0] if layout == "fixed" else None,
            dimension=same[2][-1],
            dtype=dtype,
            layout=layout,
            shards=[{key: value for key, value in e.items() if key not in self.made_from} for e in entries],
            **self.made_from,
        )
        path = self.folder / "manifest.json"
        if read_entry(path) != vars(manifest):
            write_json(path, vars(manifest))
        return manifest

    def _is_whole(self, shard: Shard) -> bool:
        sidecar = shard.sidecar(self.folder)
        entry = read_entry(sidecar)
        if entry is None or any(entry.get(key) != value for key, value in self.made_from.items()):
            return False
        if entry.get("first_row") != shard.start or entry.get("rows") != shard.rows:
            return False
        try:
            check_files(self.folder, shard, entry, verify=shard.index not in self._whole)
        except ShardError:
            return False  # pending() lists it, and it is written again
        self._whole.add(shard.index)
        return True


def check_files(folder: Path, shard: Shard, entry: Mapping[str, Any], verify: bool) -> None:
    """Raises ShardError if a file of a shard is not the one that its entry describes."""
    for kind, path in shard.files(folder, entry.get("layout", "")).items():
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


def _check_vectors(shard: Shard, vectors: np.ndarray | Ragged, flat: np.ndarray) -> str:
    """The name of their dtype."""
    lists = isinstance(vectors, Ragged)
    if flat.ndim != (2 if lists else 3) or len(vectors) != shard.rows or 0 in flat.shape:
        raise ValueError(f"shard {shard.suffix} wants vectors [{shard.rows},V,D], got {list(flat.shape)}")
    if isinstance(vectors, Ragged) and not (vectors.lengths > 0).all():
        raise ValueError(f"row {shard.start + int((vectors.lengths > 0).argmin())} has no vector")
    dtype = flat.dtype.name
    if dtype not in DTYPES:
        raise ValueError(f"shard {shard.suffix} has {dtype} vectors; they must be one of {', '.join(DTYPES)}")
    finite = np.isfinite(flat).reshape(len(flat), -1).all(axis=1)
    if not finite.all():
        place = int(finite.argmin())
        row = int(np.searchsorted(vectors.offsets, place, "right")) - 1 if isinstance(vectors, Ragged) else place
        hint = "; float16 holds nothing above 65504, so try encode.dtype=float32" if dtype == "float16" else ""
        raise ValueError(f"row {shard.start + row} has a NaN or an infinity in its vectors{hint}")
    return dtype


def _check_ids(shard: Shard, ids: Sequence[str]) -> None:
    if len(ids) != shard.rows:
        raise ValueError(f"shard {shard.suffix} has {shard.rows} rows, but {len(ids)} ids were given")
    for row, identifier in enumerate(ids, shard.start):
        if identifier.split() != [identifier]:
            raise ValueError(f"row {row} has the id {identifier!r}; an id is not empty and has no white space")


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def read_entry(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file, or None if it is missing or broken, which means the same: not done."""
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
