"""Shards of vectors on disk: complete or absent, written in any order, read through memory maps.

vectors-00000-of-00064.npy   layouts "fixed" [rows, V, D] and "ragged" [vectors, D]: float32 or float16
words-00000-of-00064.npy     layout "sparse": ids of words, uint16 or uint32 [E], ascending in each row
weights-00000-of-00064.npy   layout "sparse": weights of these words, float32 or float16 [E]
offsets-00000-of-00064.npy   not layout "fixed": first vector or word of each row, and the total, int64 [rows + 1]
ids-00000-of-00064.txt       the passage id of each row
shard-00000-of-00064.json    written last: sizes and digests of the files, the fingerprint, and the devices
begun.json                   written first: the fingerprint of the shards; removed when the manifest is written
manifest.json                written when every shard exists

Every JSON file has a digest of its other keys ("sha256").
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.runs.encoded_steps import ANNOUNCEMENT_FILE, announcement_files
from jaxret.runs.mismatch import require_equal
from jaxret.storage import atomic
from jaxret.storage.atomic import atomic_write, sha256_file, with_digest, write_json
from jaxret.storage.buckets.working_copy import stored_file
from jaxret.types import LONGEST_NORM, VECTOR_DTYPES, Ragged, SparseRows, word_dtype

MAPPED_ARRAYS = ("vectors", "words", "weights")  # files of a shard that are mapped into memory
ARRAYS = (*MAPPED_ARRAYS, "offsets")  # files of a shard, in addition to ids
# "fixed": each row has V vectors. "ragged": rows have different numbers of vectors. "sparse": rows have weights of
# words, and the "shape" of a shard is (number of weights E, size D of the vocabulary).
LAYOUTS = ("fixed", "ragged", "sparse")
# Little-endian, so that the bytes are the same on every machine.
SHARD_DTYPES = {name: np.dtype(name).newbyteorder("<").str for name in VECTOR_DTYPES}


class ShardError(ValueError):
    """A file of vectors or ids is missing, is damaged, or contradicts its manifest."""


class VectorError(ValueError):
    """The vectors of the passage with the id `passage_id` cannot be stored."""

    def __init__(self, row: int, passage_id: str, problem: str) -> None:
        super().__init__(f"passage {passage_id!r} (row {row}) {problem}")
        self.passage_id = passage_id


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a corpus."""

    index: int  # number of the shard, from 0
    count: int  # number of all shards
    start: int  # first row
    stop: int  # row after the last one

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def suffix(self) -> str:
        """The end of the names of the shard's files, such as "00000-of-00004"."""
        return f"{self.index:05d}-of-{self.count:05d}"

    def ids(self, folder: Path) -> Path:
        """Return the file of the passage ids in a folder."""
        return folder / f"ids-{self.suffix}.txt"

    def array(self, folder: Path, name: str) -> Path:
        """Return the file of one of `ARRAYS`."""
        return folder / f"{name}-{self.suffix}.npy"

    def files(self, folder: Path, layout: str) -> dict[str, Path]:
        """Return name -> path of the files of a shard. The names are keys of the sidecar."""
        names = {"fixed": ("vectors",), "sparse": ("words", "weights", "offsets")}.get(layout, ("vectors", "offsets"))
        return {name: self.array(folder, name) for name in names} | {"ids": self.ids(folder)}

    def sidecar(self, folder: Path) -> Path:
        """Return the file in a folder that has the digests and the settings of the shard."""
        return folder / f"shard-{self.suffix}.json"

    def __str__(self) -> str:
        return f"rows {self.start} to {self.stop - 1}"


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of vectors."""

    total_rows: int  # number of passages
    rows_per_shard: int  # passages of each shard; the last one may have fewer
    vectors_per_row: int | None  # V; None under "ragged" and "sparse"
    dimension: int  # D
    dtype: str  # dtype of the vectors on disk
    shards: list[dict[str, Any]]  # the entries of the sidecars, in the order of their rows
    fingerprint: dict[str, Any]  # the checkpoint, contract and corpus that produced the vectors
    layout: str  # one of `LAYOUTS`

    @property
    def vectors(self) -> int:
        """Number of vectors of all rows. A sparse row has one vector."""
        if self.layout == "ragged":
            return sum(entry["shape"][0] for entry in self.shards)
        return self.total_rows * (self.vectors_per_row or 1)

    @property
    def bytes(self) -> int:
        """Size of the vectors (or words and weights) and offsets on disk, in bytes."""
        return sum(entry[name]["bytes"] for entry in self.shards for name in ARRAYS if name in entry)


def plan_shards(total_rows: int, rows_per_shard: int) -> list[Shard]:
    """Return the shards of a corpus. The last one may have fewer rows. They depend only on the two numbers. Raises
    ValueError for a number below 1."""
    if total_rows < 1 or rows_per_shard < 1:
        raise ValueError(f"cannot cut {total_rows} rows into shards of {rows_per_shard}: both must be at least 1")
    starts = range(0, total_rows, rows_per_shard)
    return [Shard(i, len(starts), start, min(start + rows_per_shard, total_rows)) for i, start in enumerate(starts)]


class ShardWriter:
    """Writes the shards of one corpus into `folder`, in any order, from any number of processes.

    `fingerprint` is a nested JSON mapping of everything the bytes depend on. A folder whose shards have another
    fingerprint or other boundaries raises ContractError. `made_on` describes the devices. It is stored with each shard,
    but not compared, because other devices change only the last bits.
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
        self.settings = {
            "total_rows": total_rows,
            "rows_per_shard": rows_per_shard,
            "fingerprint": json.loads(json.dumps(fingerprint, allow_nan=False)),  # equal to the value in a file
        }
        self._verified_shards: set[int] = set()  # numbers of shards whose digests this process compared
        self._damaged_shards: set[int] = set()  # numbers of shards that were damaged when this process checked them
        self.require_same()

    def require_same(self) -> None:
        """Raise ContractError if a file of the folder has another fingerprint."""
        for path in announcement_files(self.folder):
            self._entry(path)

    def is_announced(self) -> bool:
        """Return whether the folder records the fingerprint of its shards. Raises ContractError if it differs."""
        return any(self._entry(path) for path in announcement_files(self.folder))

    def announce(self, work: Path | None = None) -> None:
        """Record the fingerprint before the first shard is written, so that the shards of different jobs never mix."""
        if not self.is_announced():
            write_json(self.folder / ANNOUNCEMENT_FILE, with_digest(self.settings), work)

    def withdraw_announcement(self) -> None:
        """Remove the record of the fingerprint if the folder has no shard. It is for a job that fails while no other
        job runs."""
        if read_entry(self.folder / ANNOUNCEMENT_FILE) == self.settings and not any(self.folder.glob("shard-*.json")):
            _remove(self.folder / ANNOUNCEMENT_FILE, None)

    def remove_shards(self, numbers: Collection[int]) -> None:
        """Remove shards whose contents may be wrong."""
        for shard in (shard for shard in self.shards if shard.index in numbers):
            _remove(self.folder / "manifest.json", None)
            _remove(shard.sidecar(self.folder), None)
            self._verified_shards.discard(shard.index)

    def _entry(self, path: Path) -> dict[str, Any] | None:
        """Return the contents of a file that records a fingerprint, or None. Raises ContractError if it differs."""
        entry = read_entry(path)
        if entry is None or not entry.keys() >= self.settings.keys():
            return None
        require_equal(
            self.settings,
            {key: entry[key] for key in self.settings},
            "what is to be encoded now",
            str(path),
            f"Delete {self.folder} to encode again, or choose another name for this corpus.",
        )
        return entry

    def pending(self, verify: bool = True) -> list[Shard]:
        """Return the shards that must be written because they have no sidecar or their files do not match it. With
        `verify`, digests are compared, once in each process."""
        return [shard for shard in self.shards if not self.has(shard, verify)]

    def write(
        self, shard: Shard, vectors: np.ndarray | Ragged | SparseRows, ids: Sequence[str], work: Path | None = None
    ) -> None:
        """Write one shard.

        Args:
            shard: rows to write.
            vectors: vectors [rows,V,D] in float32 or float16, a list of vectors for each row, or weights of words.
            ids: passage id of each row.
            work: folder of the shard's files until they are complete.
        """
        _check_ids(shard, ids)
        if isinstance(vectors, SparseRows):
            layout, shape = "sparse", [len(vectors.weights), vectors.dimension]
            dtype = _check_weights(shard, vectors, ids)
            arrays: dict[str, tuple[np.ndarray, str]] = {"weights": (vectors.weights, SHARD_DTYPES[dtype])}
            arrays["words"] = vectors.words, word_dtype(vectors.dimension).str
        else:
            layout = "ragged" if isinstance(vectors, Ragged) else "fixed"
            flat = vectors.flat if isinstance(vectors, Ragged) else np.asarray(vectors)
            shape, dtype = list(flat.shape), _check_vectors(shard, vectors, flat, ids)
            arrays = {"vectors": (flat, SHARD_DTYPES[dtype])}
        if isinstance(vectors, Ragged | SparseRows):
            arrays["offsets"] = vectors.offsets, "<i8"
        paths = shard.files(self.folder, layout)
        _remove(self.folder / "manifest.json", work)  # a manifest describes earlier shards
        self._verified_shards.discard(shard.index)
        for name, (array, kind) in arrays.items():
            with atomic_write(paths[name], "wb", work) as file:
                np.save(file, np.ascontiguousarray(array, kind), allow_pickle=False)
        with atomic_write(shard.ids(self.folder), "w", work) as file:
            file.writelines(f"{identifier}\n" for identifier in ids)
        entry = {
            "first_row": shard.start,
            "rows": shard.rows,
            "layout": layout,
            "shape": shape,
            "dtype": dtype,
            **({"made_on": self.made_on} if self.made_on else {}),
            **{name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for name, path in paths.items()},
        }
        write_json(shard.sidecar(self.folder), with_digest(entry | self.settings), work)
        self._verified_shards.add(shard.index)

    def finish(self, work: Path | None = None) -> Manifest:
        """Write the manifest and return it. Raises ShardError if shards are missing, damaged or differ in shape, and
        ContractError if they have another fingerprint."""
        self.require_same()
        missing_shards = self.pending()
        if missing_shards:
            names = ", ".join(shard.suffix for shard in missing_shards[:5])
            names += ", ..." if len(missing_shards) > 5 else ""
            raise ShardError(
                f"{self.folder}: {len(missing_shards)} of {len(self.shards)} shards are missing or damaged ({names}): "
                "run encode again to write them"
            )
        manifest = self.manifest()
        if not self.is_finished():
            _remove(self.folder / ANNOUNCEMENT_FILE, work)  # every shard has the fingerprint
            write_json(self.folder / "manifest.json", with_digest(vars(manifest)), work)
        return manifest

    def is_finished(self) -> bool:
        """Return whether the manifest exists and describes the shards. Digests of shards are not compared."""
        contents = read_entry(self.folder / "manifest.json")
        return contents is not None and not self.pending(verify=False) and contents == vars(self.manifest())

    def manifest(self) -> Manifest:
        """Return the manifest of the shards, which must all exist. Raises ShardError if they differ in shape."""
        entries = [read_shard_json(shard.sidecar(self.folder)) for shard in self.shards]
        layout, dtype = entries[0]["layout"], entries[0]["dtype"]
        common_axes = slice(1, None) if layout == "fixed" else slice(-1, None)  # equal in all shards: (V, D) or (D,)
        common = (layout, dtype, entries[0]["shape"][common_axes])
        for shard, entry in zip(self.shards, entries, strict=True):
            if (entry["layout"], entry["dtype"], entry["shape"][common_axes]) != common:
                path = next(iter(shard.files(self.folder, entry["layout"]).values()))
                raise ShardError(
                    f"{path}: {entry['dtype']} {entry['shape']} {entry['layout']}, but the first "
                    f"shard is {dtype} {entries[0]['shape']} {layout}: V, D and dtype must be the same in every shard"
                )
        return Manifest(
            vectors_per_row=common[2][0] if layout == "fixed" else None,
            dimension=common[2][-1],
            dtype=dtype,
            layout=layout,
            shards=[{key: value for key, value in entry.items() if key not in self.settings} for entry in entries],
            **self.settings,
        )

    def has(self, shard: Shard, verify: bool = True) -> bool:
        """Return whether a shard exists and is complete.

        With `verify`, digests are compared, unless this process compared them before. A shard that was damaged before
        is always compared.
        """
        sidecar = shard.sidecar(self.folder)
        entry = self._entry(sidecar)
        if entry is None:
            return False
        verify = (verify or shard.index in self._damaged_shards) and shard.index not in self._verified_shards
        try:
            check_entry(sidecar, shard, entry)
            check_files(self.folder, shard, entry, verify)
        except ShardError:
            self._damaged_shards.add(shard.index)
            return False  # pending() lists it, and it is written again
        if verify:
            self._verified_shards.add(shard.index)
        return True


def _remove(path: Path, work: Path | None) -> None:
    """Remove a file, if it exists. With `work`, move it into this folder of a lease, so that a job that has lost the
    lease removes nothing."""
    if not path.exists():
        return
    try:
        os.replace(path, work / path.name) if work else path.unlink()
    except FileNotFoundError:
        if path.exists():  # otherwise another job has removed it
            raise


def check_entry(path: Path, shard: Shard, entry: Any) -> None:
    """Raise ShardError with `path` if an entry is not valid or belongs to another shard."""
    problem = "is not an object"
    if isinstance(entry, Mapping):
        shape, dtype, layout = (entry.get(key) for key in ("shape", "dtype", "layout"))
        axes = {"fixed": 3, "ragged": 2, "sparse": 2}.get(layout) if isinstance(layout, str) else None
        sizes = isinstance(shape, list) and len(shape) == axes and all(type(n) is int and n >= 0 for n in shape)
        if isinstance(shape, list):
            sizes = sizes and all(shape[1:] if layout == "sparse" else shape)  # sparse texts may have no word
        if (entry.get("first_row"), entry.get("rows")) != (shard.start, shard.rows):
            problem = f"has first_row {entry.get('first_row')!r} and rows {entry.get('rows')!r}"
        elif not sizes or dtype not in list(SHARD_DTYPES):
            problem = f"has layout {layout!r}, shape {shape!r} and dtype {dtype!r}"
        else:
            return
    raise ShardError(f"{path}: the entry of shard {shard.suffix} ({shard}) {problem}; run encode again")


def check_files(folder: Path, shard: Shard, entry: Mapping[str, Any], verify: bool) -> None:
    """Raise ShardError if a file of a shard contradicts its entry.

    Args:
        folder: folder of the shard.
        shard: the shard.
        entry: entry of the shard in its sidecar.
        verify: whether to compare digests, too.
    """
    for problem in file_problems(folder, shard, entry, verify):
        raise problem


def file_problems(folder: Path, shard: Shard, entry: Mapping[str, Any], verify: bool) -> Iterator[ShardError]:
    """Yield the errors in the files of a shard.

    Args:
        folder: folder of the shard.
        shard: the shard.
        entry: entry of the shard in its sidecar.
        verify: whether to compare digests, too.
    """
    for kind, path in shard.files(folder, entry.get("layout", "")).items():
        expected = entry.get(kind)
        if not isinstance(expected, dict) or set(expected) != {"bytes", "sha256"}:
            yield ShardError(
                f"{folder}: the entry of shard {shard.suffix} ({shard}) does not describe its {kind}; run encode again"
            )
            continue
        remote_file = None if path.is_file() else stored_file(path)  # a file that another job wrote to the bucket
        if not remote_file and not path.is_file():
            yield ShardError(f"{path} ({shard}) does not exist; run encode again")
        elif (size := remote_file.size if remote_file else path.stat().st_size) != expected["bytes"]:
            yield ShardError(f"{path} ({shard}): {size} bytes, but {expected['bytes']} were written; run encode again")
        elif verify and (remote_file.sha256 if remote_file else sha256_file(path)) != expected["sha256"]:
            yield ShardError(
                f"{path} ({shard}): damaged (its SHA-256 differs from the one that was written); run encode again"
            )


def _check_vectors(shard: Shard, vectors: np.ndarray | Ragged, flat: np.ndarray, ids: Sequence[str]) -> str:
    """Return the name of the vectors' dtype. Raises ValueError or VectorError."""
    lists = isinstance(vectors, Ragged)
    if flat.ndim != (2 if lists else 3) or len(vectors) != shard.rows or 0 in flat.shape:
        raise ValueError(f"shard {shard.suffix} needs vectors [{shard.rows},V,D], got {list(flat.shape)}")
    if isinstance(vectors, Ragged):
        if not (vectors.lengths > 0).all():
            row = int((vectors.lengths > 0).argmin())
            raise VectorError(shard.start + row, ids[row], "has no vector")
        first, last = int(vectors.offsets[0]), int(vectors.offsets[-1])
        if (first, last) != (0, len(flat)):
            raise ValueError(f"shard {shard.suffix}: offsets go from {first} to {last}, not from 0 to {len(flat)}")
    dtype = flat.dtype.name
    if dtype not in SHARD_DTYPES:
        raise ValueError(f"shard {shard.suffix} has {dtype} vectors; they must be one of {', '.join(SHARD_DTYPES)}")
    sound = (np.einsum("...d,...d->...", flat, flat, dtype=np.float64) < LONGEST_NORM**2).reshape(len(flat), -1)
    if not sound.all():
        place = int(sound.all(axis=1).argmin())
        row = int(np.searchsorted(vectors.offsets, place, "right")) - 1 if isinstance(vectors, Ragged) else place
        hint = "; float16 holds nothing above 65504, so try float32" if dtype == "float16" else ""
        raise VectorError(
            shard.start + row, ids[row], f"has a NaN, an infinity or a number too large in its vectors{hint}"
        )
    return dtype


def _check_weights(shard: Shard, vectors: SparseRows, ids: Sequence[str]) -> str:
    """Return the name of the weights' dtype. Raises ValueError or VectorError."""
    entries = len(vectors.weights)
    if len(vectors) != shard.rows or (vectors.offsets[0], vectors.offsets[-1], len(vectors.words)) != (
        0,
        entries,
        entries,
    ):
        raise ValueError(
            f"shard {shard.suffix} needs words of {shard.rows} rows, got {entries} words of {len(vectors)} rows"
        )
    dtype = vectors.weights.dtype.name
    if dtype not in SHARD_DTYPES:
        raise ValueError(f"shard {shard.suffix} has {dtype} weights; they must be one of {', '.join(SHARD_DTYPES)}")
    sound = np.isfinite(vectors.weights) & (vectors.weights > 0)
    if not sound.all():
        row = int(np.searchsorted(vectors.offsets, int(sound.argmin()), "right")) - 1
        hint = "; float16 holds nothing above 65504, so try float32" if dtype == "float16" else ""
        raise VectorError(shard.start + row, ids[row], f"has a weight that is not a number above 0{hint}")
    rows = np.repeat(np.arange(len(vectors)), vectors.word_counts)
    squares = np.bincount(rows, vectors.weights.astype(np.float64) ** 2, len(vectors))
    if (long := squares >= LONGEST_NORM**2).any():
        row = int(long.argmax())
        raise VectorError(shard.start + row, ids[row], "has weights that are too large for products in float32")
    return dtype


def _check_ids(shard: Shard, ids: Sequence[str]) -> None:
    if len(ids) != shard.rows:
        raise ValueError(f"shard {shard.suffix} has {shard.rows} rows, but {len(ids)} ids were given")
    for row, identifier in enumerate(ids, shard.start):
        if identifier.split() != [identifier]:
            raise ValueError(f"row {row} has the id {identifier!r}; an id is not empty and has no white space")


def read_shard_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file with a digest. Raises FileNotFoundError, and ShardError if it is damaged."""
    try:
        return atomic.read_with_digest(path)
    except ValueError as error:
        raise ShardError(f"{error}; run encode again") from error


def read_entry(path: Path) -> dict[str, Any] | None:
    """Return the contents of a JSON file with a digest, or None if it is missing or damaged, because in both cases the
    work must be done."""
    try:
        return read_shard_json(path)
    except (FileNotFoundError, ShardError):
        return None


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file. Raises ShardError if it is damaged, or if its numbers contradict each other."""
    contents = read_shard_json(path)
    if set(contents) != set(Manifest.__annotations__):
        raise ShardError(f"{path}: its keys are not the keys of a manifest; run encode again")
    layout, shards = contents["layout"], contents["shards"]
    if layout not in LAYOUTS:
        raise ShardError(f"{path}: layout is {layout!r}, not one of {', '.join(LAYOUTS)}; run encode again")
    for name in ("total_rows", "rows_per_shard", "dimension", "vectors_per_row")[: 4 if layout == "fixed" else 3]:
        if type(contents[name]) is not int or contents[name] < 1:
            raise ShardError(f"{path}: {name} is {contents[name]!r}, not a whole number above 0; run encode again")
    if not isinstance(shards, list) or not isinstance(contents["fingerprint"], dict):
        raise ShardError(f"{path}: shards must be a list and fingerprint an object; run encode again")
    count = -(-contents["total_rows"] // contents["rows_per_shard"])
    if len(shards) != count:
        raise ShardError(f"{path}: lists {len(shards)} shards, but {count} are needed; run encode again")
    for shard, entry in zip(plan_shards(contents["total_rows"], contents["rows_per_shard"]), shards, strict=True):
        check_entry(path, shard, entry)
        shape = [shard.rows, contents["vectors_per_row"], contents["dimension"]]
        if layout != "fixed":
            shape = [entry["shape"][0], contents["dimension"]]
        if (entry["shape"], entry["dtype"], entry["layout"]) != (shape, contents["dtype"], layout):
            raise ShardError(
                f"{path}: the entry of shard {shard.suffix} ({shard}) contradicts the totals; run encode again"
            )
    return Manifest(**(contents | {"vectors_per_row": contents["vectors_per_row"] if layout == "fixed" else None}))
