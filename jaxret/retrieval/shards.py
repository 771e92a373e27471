"""Vectors on disk: shards that are whole or not there, written in any order, read through memory maps.

vectors-00000-of-00064.npy   layout "fixed": [rows, V, D]; "ragged": [vectors, D]; float32 or float16
offsets-00000-of-00064.npy   layout "ragged" alone: int64 [rows + 1], where the vectors of each row begin and end
ids-00000-of-00064.txt       the passage id of each row
shard-00000-of-00064.json    written last: sizes and digests of the files, what they were made from, and on what
begun.json                   written first: what the shards are to be made from; goes when the manifest comes
manifest.json                written when every shard is there

All kinds of JSON file carry a digest of themselves ("sha256", of their other keys); those of older code do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret import storage
from jaxret.contract import require_equal
from jaxret.storage import atomic_write, sealed, sha256_file, write_json
from jaxret.types import VECTOR_DTYPES, Ragged

BEGUN = "begun.json"
LAYOUTS = ("fixed", "ragged")  # V vectors for every row, or each row its own number
# Little-endian, so that the bytes are the same on every machine.
DTYPES = {name: np.dtype(name).newbyteorder("<").str for name in VECTOR_DTYPES}


class ShardError(ValueError):
    """A file of vectors or ids is missing, damaged or not what its manifest says."""


class VectorError(ValueError):
    """A passage's vectors cannot be stored; `passage_id` says which passage it is."""

    def __init__(self, row: int, passage_id: str, problem: str) -> None:
        super().__init__(f"passage {passage_id!r} (row {row}) {problem}")
        self.passage_id = passage_id


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

    def __str__(self) -> str:
        return f"rows {self.start} to {self.stop - 1}"


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
    another fingerprint or other boundaries raises ContractError. `made_on` is noted with each shard, and not compared:
    it may change the last bits, no more.
    """

    def __init__(
        self,
        folder: Path,
        total_rows: int,
        rows_per_shard: int,
        fingerprint: Mapping[str, Any],
        made_on: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.made_on = dict(made_on or {})
        self.shards = plan_shards(total_rows, rows_per_shard)
        self.made_from = {
            "total_rows": total_rows,
            "rows_per_shard": rows_per_shard,
            "fingerprint": json.loads(json.dumps(fingerprint, allow_nan=False)),  # as it will be read back
        }
        self._whole: set[int] = set()  # shards whose digests this process has seen to be right
        self._damaged: set[int] = set()  # and those that it has seen to be wrong
        self.require_same()

    def require_same(self) -> None:
        """Raises ContractError if a file of the folder is of something else."""
        for path in begun(self.folder):
            self._entry(path)

    def begun(self) -> bool:
        """Whether the folder says what its shards are made from. Raises ContractError if it is something else."""
        return any(self._entry(path) for path in begun(self.folder))

    def begin(self, work: Path | None = None) -> None:
        """Says so before the first shard is written, so that jobs that are asked for different things never mix."""
        if not self.begun():
            write_json(self.folder / BEGUN, sealed(self.made_from), work)

    def withdraw(self) -> None:
        """Has the folder say nothing again if it has no shard; for a job that fails where there is no other."""
        if read_entry(self.folder / BEGUN) == self.made_from and not any(self.folder.glob("shard-*.json")):
            _retire(self.folder / BEGUN, None)

    def retract(self, written: Collection[int]) -> None:
        """Takes shards away again, for a job that learns what it wrote may not be what they say."""
        for shard in (shard for shard in self.shards if shard.index in written):
            _retire(self.folder / "manifest.json", None)
            _retire(shard.sidecar(self.folder), None)
            self._whole.discard(shard.index)

    def _entry(self, path: Path) -> dict[str, Any] | None:
        """What a file says of what the shards are made from, and of its own; None if it says nothing."""
        found = read_entry(path)
        if found is None or not found.keys() >= self.made_from.keys():
            return None
        require_equal(
            self.made_from,
            {key: found[key] for key in self.made_from},
            "what is to be encoded now",
            str(path),
            f"Delete {self.folder} to encode again, or choose another name for this corpus.",
        )
        return found

    def pending(self, verify: bool = True) -> list[Shard]:
        """The shards still to write: those without a sidecar, or whose files do not match it. verify: digests are
        compared too, once."""
        return [shard for shard in self.shards if not self.has(shard, verify)]

    def write(self, shard: Shard, vectors: np.ndarray | Ragged, ids: Sequence[str], work: Path | None = None) -> None:
        """Writes one shard: `vectors` [rows,V,D] float32 or float16, or a list of vectors for each row; and the passage
        id of each row. work: the folder of its files until they are whole."""
        layout = "ragged" if isinstance(vectors, Ragged) else "fixed"
        flat = vectors.flat if isinstance(vectors, Ragged) else np.asarray(vectors)
        _check_ids(shard, ids)
        dtype = _check_vectors(shard, vectors, flat, ids)
        _retire(self.folder / "manifest.json", work)  # it describes the shards that were there before
        self._whole.discard(shard.index)
        with atomic_write(shard.vectors(self.folder), "wb", work) as file:
            np.save(file, np.ascontiguousarray(flat, DTYPES[dtype]), allow_pickle=False)
        if isinstance(vectors, Ragged):
            with atomic_write(shard.offsets(self.folder), "wb", work) as file:
                np.save(file, np.ascontiguousarray(vectors.offsets, "<i8"), allow_pickle=False)
        with atomic_write(shard.ids(self.folder), "w", work) as file:
            file.writelines(f"{identifier}\n" for identifier in ids)
        entry = {
            "first_row": shard.start,
            "rows": shard.rows,
            "layout": layout,
            "shape": list(flat.shape),
            "dtype": dtype,
            **({"made_on": self.made_on} if self.made_on else {}),
            **{name: _describe(path) for name, path in shard.files(self.folder, layout).items()},
        }
        write_json(shard.sidecar(self.folder), sealed(entry | self.made_from), work)
        self._whole.add(shard.index)

    def finish(self, work: Path | None = None) -> Manifest:
        """Writes the manifest. Raises ShardError naming the shards that are missing or differ in shape, and
        ContractError for some that are of something else."""
        self.require_same()
        missing = self.pending()
        if missing:
            names = ", ".join(shard.suffix for shard in missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ShardError(
                f"{self.folder}: {len(missing)} of {len(self.shards)} shards are missing or damaged ({names}): "
                "run encode again to write them"
            )
        manifest = self.manifest()
        if not self.finished():
            _retire(self.folder / BEGUN, work)  # the shards say it
            write_json(self.folder / "manifest.json", sealed(vars(manifest)), work)
        return manifest

    def finished(self) -> bool:
        """Whether the manifest is there, and that of the shards; of these, no digest is compared."""
        found = read_entry(self.folder / "manifest.json")
        return found is not None and not self.pending(verify=False) and found == vars(self.manifest())

    def manifest(self) -> Manifest:
        """That of the shards, which are all there. Raises ShardError for one that differs in shape."""
        entries = [read_sealed(shard.sidecar(self.folder)) for shard in self.shards]
        layout, dtype = entries[0]["layout"], entries[0]["dtype"]
        fixed = slice(1, None) if layout == "fixed" else slice(-1, None)  # what all shards share: (V, D) or (D,)
        same = (layout, dtype, entries[0]["shape"][fixed])
        for shard, entry in zip(self.shards, entries, strict=True):
            if (entry["layout"], entry["dtype"], entry["shape"][fixed]) != same:
                raise ShardError(
                    f"{shard.vectors(self.folder)}: {entry['dtype']} {entry['shape']} {entry['layout']}, but the first "
                    f"shard is {dtype} {entries[0]['shape']} {layout}: V, D and dtype must be the same in every shard"
                )
        return Manifest(
            vectors_per_row=same[2][0] if layout == "fixed" else None,
            dimension=same[2][-1],
            dtype=dtype,
            layout=layout,
            shards=[{key: value for key, value in e.items() if key not in self.made_from} for e in entries],
            **self.made_from,
        )

    def has(self, shard: Shard, verify: bool = True) -> bool:
        """Whether a shard is there, whole. verify: digests are compared too, unless they are known to be right; of one
        that was damaged they always are."""
        sidecar = shard.sidecar(self.folder)
        entry = self._entry(sidecar)
        if entry is None:
            return False
        verify = (verify or shard.index in self._damaged) and shard.index not in self._whole
        try:
            check_entry(sidecar, shard, entry)
            check_files(self.folder, shard, entry, verify)
        except ShardError:
            self._damaged.add(shard.index)
            return False  # pending() lists it, and it is written again
        if verify:
            self._whole.add(shard.index)
        return True


def begun(folder: Path) -> Iterator[Path]:
    """The files of a folder that may say what its shards are made from."""
    yield from (folder / BEGUN, folder / "manifest.json")
    yield from sorted(folder.glob("shard-*.json"))


def _retire(path: Path, work: Path | None) -> None:
    """Takes a file away, if it is there: into the folder `work`, so that who has lost that takes nothing away."""
    if not path.exists():
        return
    try:
        os.replace(path, work / path.name) if work else path.unlink()
    except FileNotFoundError:
        if path.exists():  # else another job was faster
            raise


def check_entry(path: Path, shard: Shard, entry: Any) -> None:
    """Raises ShardError, naming `path`, if an entry is not of that shard or makes no sense."""
    problem = "is no object"
    if isinstance(entry, Mapping):
        shape, dtype, layout = (entry.get(key) for key in ("shape", "dtype", "layout"))
        axes = {"fixed": 3, "ragged": 2}.get(layout) if isinstance(layout, str) else None
        sizes = isinstance(shape, list) and len(shape) == axes and all(type(n) is int and n > 0 for n in shape)
        if (entry.get("first_row"), entry.get("rows")) != (shard.start, shard.rows):
            problem = f"is of rows from {entry.get('first_row')!r}, {entry.get('rows')!r} of them"
        elif not sizes or dtype not in list(DTYPES):
            problem = f"says {layout!r}, {shape!r}, {dtype!r} of layout, shape and dtype"
        else:
            return
    raise ShardError(f"{path}: the entry of shard {shard.suffix} ({shard}) {problem}; run encode again")


def check_files(folder: Path, shard: Shard, entry: Mapping[str, Any], verify: bool) -> None:
    """Raises ShardError if a file of a shard is not the one that its entry describes."""
    for problem in file_problems(folder, shard, entry, verify):
        raise problem


def file_problems(folder: Path, shard: Shard, entry: Mapping[str, Any], verify: bool) -> Iterator[ShardError]:
    """What is wrong with the files of a shard; verify: with their digests too."""
    for kind, path in shard.files(folder, entry.get("layout", "")).items():
        expected = entry.get(kind)
        if not isinstance(expected, dict) or set(expected) != {"bytes", "sha256"}:
            yield ShardError(
                f"{folder}: the entry of shard {shard.suffix} ({shard}) says nothing of its {kind}; run encode again"
            )
        elif not path.is_file():
            yield ShardError(f"{path} ({shard}) does not exist; run encode again")
        elif (size := path.stat().st_size) != expected["bytes"]:
            yield ShardError(f"{path} ({shard}): {size} bytes, {expected['bytes']} were written; run encode again")
        elif verify and sha256_file(path) != expected["sha256"]:
            yield ShardError(
                f"{path} ({shard}): damaged (its SHA-256 is not the one that was written); run encode again"
            )


def _check_vectors(shard: Shard, vectors: np.ndarray | Ragged, flat: np.ndarray, ids: Sequence[str]) -> str:
    """The name of their dtype."""
    lists = isinstance(vectors, Ragged)
    if flat.ndim != (2 if lists else 3) or len(vectors) != shard.rows or 0 in flat.shape:
        raise ValueError(f"shard {shard.suffix} wants vectors [{shard.rows},V,D], got {list(flat.shape)}")
    if isinstance(vectors, Ragged):
        if not (vectors.lengths > 0).all():
            row = int((vectors.lengths > 0).argmin())
            raise VectorError(shard.start + row, ids[row], "has no vector")
        first, last = int(vectors.offsets[0]), int(vectors.offsets[-1])
        if (first, last) != (0, len(flat)):
            raise ValueError(f"shard {shard.suffix}: offsets go from {first} to {last}, not from 0 to {len(flat)}")
    dtype = flat.dtype.name
    if dtype not in DTYPES:
        raise ValueError(f"shard {shard.suffix} has {dtype} vectors; they must be one of {', '.join(DTYPES)}")
    finite = np.isfinite(flat).reshape(len(flat), -1).all(axis=1)
    if not finite.all():
        place = int(finite.argmin())
        row = int(np.searchsorted(vectors.offsets, place, "right")) - 1 if isinstance(vectors, Ragged) else place
        hint = "; float16 holds nothing above 65504, so try float32" if dtype == "float16" else ""
        raise VectorError(shard.start + row, ids[row], f"has a NaN or an infinity in its vectors{hint}")
    return dtype


def _check_ids(shard: Shard, ids: Sequence[str]) -> None:
    if len(ids) != shard.rows:
        raise ValueError(f"shard {shard.suffix} has {shard.rows} rows, but {len(ids)} ids were given")
    for row, identifier in enumerate(ids, shard.start):
        if identifier.split() != [identifier]:
            raise ValueError(f"row {row} has the id {identifier!r}; an id is not empty and has no white space")


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def read_sealed(path: Path) -> dict[str, Any]:
    """What `sealed` was given. Raises FileNotFoundError, and ShardError if the file is not what was written."""
    try:
        return storage.read_sealed(path)
    except ValueError as error:
        raise ShardError(f"{error}; run encode again") from error


def read_entry(path: Path) -> dict[str, Any] | None:
    """As `read_sealed`, or None if the file is missing or broken, which means the same: not done."""
    try:
        return read_sealed(path)
    except (FileNotFoundError, ShardError):
        return None


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; nothing is made of its numbers before they agree with each other. Raises ShardError."""
    found = read_sealed(path)
    if set(found) != set(Manifest.__annotations__):
        raise ShardError(f"{path}: not a manifest of this version; run encode again")
    layout, shards = found["layout"], found["shards"]
    if layout not in LAYOUTS:
        raise ShardError(f"{path}: layout {layout!r} is none of {', '.join(LAYOUTS)}; run encode again")
    for name in ("total_rows", "rows_per_shard", "dimension", "vectors_per_row")[: 4 if layout == "fixed" else 3]:
        if type(found[name]) is not int or found[name] < 1:
            raise ShardError(f"{path}: {name} is {found[name]!r}, no whole number from 1; run encode again")
    if not isinstance(shards, list) or not isinstance(found["fingerprint"], dict):
        raise ShardError(f"{path}: shards must be a list and fingerprint an object; run encode again")
    count = -(-found["total_rows"] // found["rows_per_shard"])
    if len(shards) != count:
        raise ShardError(f"{path}: lists {len(shards)} shards, {count} are right; run encode again")
    for shard, entry in zip(plan_shards(found["total_rows"], found["rows_per_shard"]), shards, strict=True):
        check_entry(path, shard, entry)
        shape = [shard.rows, found["vectors_per_row"], found["dimension"]]
        if layout == "ragged":
            shape = [entry["shape"][0], found["dimension"]]
        if (entry["shape"], entry["dtype"], entry["layout"]) != (shape, found["dtype"], layout):
            raise ShardError(
                f"{path}: the entry of shard {shard.suffix} ({shard}) contradicts the totals; run encode again"
            )
    return Manifest(**(found | {"vectors_per_row": found["vectors_per_row"] if layout == "fixed" else None}))
