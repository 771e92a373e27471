"""An encoded corpus for search: the rows of all its parts, numbered continuously over the parts.

Deleted passages, and passages that do not match a filter, have no row: they are left out before scores are computed. So
a search and its proof return the same result as for a corpus without these passages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.parts_list import CorpusPart, parts_identity, read_parts
from jaxret.index.row_subset import RaggedRowSubset, RowSubset, cut_shard
from jaxret.index.shard_set import ShardSet, open_shards, raise_file_limit, read_shards
from jaxret.index.shards import ARRAYS, ShardError
from jaxret.storage.atomic import sha256_file
from jaxret.storage.file_state import FileState, file_state
from jaxret.types import Ragged, SparseRows


class EncodedCorpus:
    """The rows of an encoded corpus that are searched."""

    def __init__(
        self,
        folder: Path,
        parts: list[CorpusPart],
        shards: list[ShardSet],
        selection: np.ndarray | None,
        cut: tuple[int, bool] = (0, False),
    ) -> None:
        """Keep the rows of a selection.

        Args:
            folder: folder of the encoded corpus.
            parts: parts of the encoded corpus.
            shards: a ShardSet for each part.
            selection: rows that are searched, numbered through all parts, int64 ascending; None: all rows.
            cut: (dimensions that are read, the first ones of a vector; 0: all, whether they are scaled to length 1).
        """
        self.folder, self.parts, self.shards, self.selection, self.cut = folder, parts, shards, selection, cut
        self.firsts = np.cumsum([0, *(part.total_rows for part in shards)])  # first row of each part

    @property
    def total_rows(self) -> int:
        """Number of rows that are searched: those of the selection, or all."""
        return int(self.firsts[-1]) if self.selection is None else len(self.selection)

    @property
    def dimension(self) -> int:
        """D, the number of dimensions that are read of each vector."""
        return self.cut[0] or self.shards[0].dimension

    @property
    def ragged(self) -> bool:
        """Whether rows have different numbers of vectors."""
        return self.shards[0].ragged

    @property
    def sparse(self) -> bool:
        """Whether vectors are weights of words."""
        return self.shards[0].sparse

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The settings and the corpus that the first part was made from. All parts have its contract and checkpoint."""
        return self.shards[0].fingerprint

    @property
    def corpus_identity(self) -> dict[str, Any]:
        """{"sha256", "passages"} of the corpus without a filter, for results. After an append or a deletion, the digest
        is computed from the list of parts."""
        return parts_identity(self.parts)

    @property
    def bytes_per_passage(self) -> float:
        """Mean bytes on disk of a passage's vectors (or words and weights) and offsets, without ids and digests."""
        entries = [entry for part in self.shards for entry in part.manifest.shards]
        shares = {"vectors": self.dimension / self.shards[0].dimension}  # share of the bytes that are read
        sizes = (entry[name]["bytes"] * shares.get(name, 1) for entry in entries for name in ARRAYS if name in entry)
        return sum(sizes) / int(self.firsts[-1])

    def select(self, rows: np.ndarray) -> EncodedCorpus:
        """Return the corpus with only those of its rows that are in `rows`, int64 ascending. The numbers in `rows`
        continue from part to part and include deleted rows."""
        selection = rows if self.selection is None else np.intersect1d(self.selection, rows, assume_unique=True)
        return EncodedCorpus(self.folder, self.parts, self.shards, selection, self.cut)

    def with_dimension(self, size: int, normalize: bool) -> EncodedCorpus:
        """Return the corpus with the first `size` dimensions of every vector, see `cut_vectors`. Raises ValueError if
        the stored vectors have fewer dimensions."""
        dimension = self.shards[0].dimension
        if not 1 <= size <= dimension:
            raise ValueError(f"dimension is {size}, but the vectors in {self.folder} have dimension {dimension}")
        cut = (0, False) if size == dimension else (size, normalize)
        return EncodedCorpus(self.folder, self.parts, self.shards, self.selection, cut)

    def select_first(self, count: int) -> EncodedCorpus:
        """Return the corpus with the first `count` of its rows."""
        return self.select(np.arange(count) if self.selection is None else self.selection[:count])

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (first row, vectors [rows,V,D] or lists of vectors) of each shard."""
        for part, first in zip(self.shards, self.firsts):
            for shard in part.shards:
                shard_start = int(first) + shard.start
                begin, end = self._places(shard_start, int(first) + shard.stop)
                if begin < end:  # files without a selected row are not opened
                    rows = None if end - begin == shard.rows else self._select_rows(begin, end) - shard_start
                    vectors = _rows_of(part.map(shard), rows)
                    yield begin, (cut_shard(vectors, *self.cut) if self.cut[0] else vectors)

    def _places(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of this corpus's rows that lie between rows `start` and `stop` (excluded) of all parts."""
        if self.selection is None:
            return start, stop
        begin, end = np.searchsorted(self.selection, [start, stop])
        return int(begin), int(end)

    def _select_rows(self, begin: int, end: int) -> np.ndarray:
        """Return the numbers in the whole corpus of rows `begin` to `end` (excluded) of this selection."""
        return np.arange(begin, end) if self.selection is None else self.selection[begin:end]

    def rows_in_range(self, number: int, count: int) -> tuple[int, int]:
        """Return (first row, row after the last one) of a range of consecutive shards, one of `count` ranges."""
        return self._places(*range_of_shards(self.shards, number, count))

    def in_range(self, number: int, count: int) -> tuple[int, EncodedCorpus]:
        """Return (number of rows before it, corpus) for a range of consecutive shards, one of `count` ranges
        (`range_of_shards`). The range may have no rows."""
        begin, end = self.rows_in_range(number, count)
        return begin, EncodedCorpus(self.folder, self.parts, self.shards, self._select_rows(begin, end), self.cut)

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return the passage ids of some rows. One file of ids at a time is read, and only these ids are kept. Raises
        IndexError for a row that the corpus does not have."""
        rows = np.asarray(indices, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.total_rows):
            outside = rows[(rows < 0) | (rows >= self.total_rows)][0]
            raise IndexError(f"{self.folder}: row {outside} is outside 0 to {self.total_rows - 1}")
        result = [""] * len(rows)
        for number, places, part_rows in self.by_part(rows):
            for place, key in zip(places, self.shards[number].ids(part_rows)):
                result[place] = key
        return result

    def require_unwritten(self, rows: np.ndarray) -> None:
        """Raise ShardError if a file with vectors of these rows was changed after it was mapped into memory."""
        for number, _, part_rows in self.by_part(rows):
            self.shards[number].require_unwritten(part_rows)

    def by_part(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (number of a part, positions of its rows in `rows`, numbers of these rows in the part)."""
        rows = rows if self.selection is None else self.selection[rows]
        part_of = np.searchsorted(self.firsts, rows, "right") - 1
        for number in np.unique(part_of).tolist():
            places = np.flatnonzero(part_of == number)
            yield number, places, rows[places] - self.firsts[number]

    def id_blocks(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (first row, passage ids) of a block of rows at a time, in order."""
        for start in range(0, self.total_rows, _ID_ROWS):
            yield start, self.ids(np.arange(start, min(start + _ID_ROWS, self.total_rows)))

    def describe(self, row: int) -> str:
        """Return the name of a row for messages: its number and its passage."""
        return f"passage row {row} ({self.ids([row])[0]!r} in {self.folder})"

    @cached_property
    def deleted_ids(self) -> set[str]:
        """The ids of deleted passages that were not appended again."""
        ids: set[str] = set()
        for part, shards in zip(self.parts, self.shards, strict=True):
            present = part.present
            if ids:
                ids.difference_update(shards.ids(np.flatnonzero(present)))
            if not present.all():
                ids.update(shards.ids(np.flatnonzero(~present)))
        return ids

    def missing_ids(self, ids: set[str]) -> set[str]:
        """Return the ids that are not in the corpus."""
        absent_ids = set(ids)
        for _, block in self.id_blocks():
            if not absent_ids:
                break
            absent_ids.difference_update(block)
        return absent_ids


_VERSION_FILES = ("manifest.json", "parts.json")  # files that list the vectors


def corpus_state(folder: Path) -> list[FileState]:
    """Return the states of the files that list the vectors of an encoded corpus. This is faster than `corpus_version`,
    but the states also change if a file is written again with the same content."""
    return [file_state(folder / name) for name in _VERSION_FILES]


def corpus_version(folder: Path) -> list[str]:
    """Return digests of the files that list the vectors of an encoded corpus; "" for missing files."""
    versions = []
    for name in _VERSION_FILES:
        try:
            versions.append(sha256_file(folder / name))
        except FileNotFoundError:
            versions.append("")
    return versions


_ID_ROWS = 65_536  # rows whose ids are held at a time


def range_of_shards(parts: Sequence[ShardSet], number: int, count: int) -> tuple[int, int]:
    """Return (first row, row after the last one) of the range `number` of `count` ranges of consecutive shards. Row
    numbers continue from part to part.

    Ranges have about equally many rows. If there are fewer shards than ranges, some ranges are empty.
    """
    ends = np.cumsum([0, *(shard.rows for part in parts for shard in part.shards)])
    begin, end = (int(ends[np.abs(ends * count - ends[-1] * bound).argmin()]) for bound in (number, number + 1))
    return begin, end


def open_encoded(folder: str | Path, verify: bool = True, only: tuple[int, int] = (0, 1)) -> EncodedCorpus:
    """Open an encoded corpus with all its parts. Check rows, dtype, shapes and sizes, and with `verify` every digest.

    Args:
        folder: folder of the encoded corpus.
        verify: whether to compare digests.
        only: (number, count) of the range of shards whose vectors are fetched and checked (`range_of_shards`).

    Raises:
        ShardError: a file is missing, damaged or not of this corpus. The error names the file.
    """
    folder = Path(folder)
    parts = read_parts(folder)
    shards = _open_range([folder / part.name for part in parts] or [folder], verify, *only)
    raise_file_limit(sum(shard_set.mapped_files for shard_set in shards))
    if not parts:
        sha256 = corpus_of(shards[0]).get("sha256", "")
        return EncodedCorpus(folder, [CorpusPart("", sha256, shards[0].total_rows)], shards, None)
    first = shards[0].manifest
    for part, shard_set in zip(parts, shards):
        if (corpus_of(shard_set).get("sha256"), shard_set.total_rows) != (part.sha256, part.rows):
            raise ShardError(f"{shard_set.folder}: its vectors belong to other texts than {folder}/parts.json names")
        manifest = shard_set.manifest
        if (manifest.layout, manifest.vectors_per_row, manifest.dimension, manifest.dtype) != (
            first.layout,
            first.vectors_per_row,
            first.dimension,
            first.dtype,
        ):
            raise ShardError(
                f"{shard_set.folder}: its vectors have another shape or dtype than the vectors in {folder}"
            )
    mask = np.concatenate([part.present for part in parts])
    return EncodedCorpus(folder, parts, shards, None if mask.all() else np.flatnonzero(mask))


def _open_range(folders: Sequence[Path], verify: bool, number: int, count: int) -> list[ShardSet]:
    """Open folders of vectors, and check the shards that are in a range of consecutive shards of all folders."""
    if count == 1:
        return [open_shards(folder, verify) for folder in folders]
    shard_sets = [read_shards(folder) for folder in folders]
    begin, end = range_of_shards(shard_sets, number, count)
    first = 0
    for shard_set in shard_sets:
        shard_set.check([shard for shard in shard_set.shards if begin <= first + shard.start < end], verify)
        first += shard_set.total_rows
    return shard_sets


def _rows_of(shard: Any, rows: np.ndarray | None) -> Any:
    """Return the given rows of a shard, or the shard if `rows` is None."""
    if rows is None:
        return shard
    if isinstance(shard, SparseRows):
        return shard.take(rows)
    return RaggedRowSubset(shard, rows) if isinstance(shard, Ragged) else RowSubset(shard, rows)


def corpus_of(shards: ShardSet) -> dict[str, Any]:
    """Return the corpus entry of a folder of vectors; {} if it has none."""
    entry = shards.fingerprint.get("corpus")
    return entry if isinstance(entry, dict) else {}
