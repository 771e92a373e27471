"""An encoded corpus for search: the rows of all its parts, numbered one part after the other.

Passages that were deleted, or that do not match a filter, have no row: they are left out before anything is scored. So
the proof of a search covers the remaining rows, and its result is that of a corpus which holds nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.cut_shard import cut_shard
from jaxret.index.parts_list import CorpusPart, parts_identity, read_parts
from jaxret.index.row_subset import RaggedRowSubset, RowSubset
from jaxret.index.shard_set import ShardSet, open_shards, raise_file_limit, read_shards
from jaxret.index.shards import ARRAYS, ShardError
from jaxret.storage.atomic import sha256_file
from jaxret.storage.file_state import FileState, file_state
from jaxret.types import Ragged, SparseRows


class EncodedCorpus:
    """The remaining rows of some folders of vectors.

    `shards`: one ShardSet a part; `selection`: their rows, numbered through all parts, int64 ascending (None: all of
    them); `cut`: numbers of a vector that are read, its first ones (0: all), and whether these are scaled to length 1.
    """

    def __init__(
        self,
        folder: Path,
        parts: list[CorpusPart],
        shards: list[ShardSet],
        selection: np.ndarray | None,
        cut: tuple[int, bool] = (0, False),
    ) -> None:
        self.folder, self.parts, self.shards, self.selection, self.cut = folder, parts, shards, selection, cut
        self.firsts = np.cumsum([0, *(each.total_rows for each in shards)])  # first row of each part

    @property
    def total_rows(self) -> int:
        return int(self.firsts[-1]) if self.selection is None else len(self.selection)

    @property
    def dimension(self) -> int:
        return self.cut[0] or self.shards[0].dimension

    @property
    def ragged(self) -> bool:
        return self.shards[0].ragged

    @property
    def sparse(self) -> bool:
        """Whether vectors are weights of words."""
        return self.shards[0].sparse

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return what the first part was made from; contract and checkpoint are those of all parts."""
        return self.shards[0].fingerprint

    @property
    def corpus_identity(self) -> dict[str, Any]:
        """Return {"sha256", "passages"} of the passages, filtered or not: results record it. After an append or a
        deletion, the digest is of the list of parts."""
        return parts_identity(self.parts)

    @property
    def bytes_per_passage(self) -> float:
        """Return the bytes on disk of vectors, or words and weights, and of the offsets of each passage's; without ids
        and digests."""
        entries = [entry for each in self.shards for entry in each.manifest.shards]
        read = {"vectors": self.dimension / self.shards[0].dimension}  # share of the bytes
        sizes = (entry[name]["bytes"] * read.get(name, 1) for entry in entries for name in ARRAYS if name in entry)
        return sum(sizes) / int(self.firsts[-1])

    def select(self, rows: np.ndarray) -> EncodedCorpus:
        """Return the corpus with those of its rows that are in `rows`: numbered through all parts, deleted ones too;
        int64 ascending."""
        selection = rows if self.selection is None else np.intersect1d(self.selection, rows, assume_unique=True)
        return EncodedCorpus(self.folder, self.parts, self.shards, selection, self.cut)

    def with_dimension(self, size: int, normalize: bool) -> EncodedCorpus:
        """Return the corpus with the first `size` numbers of every vector, as `cut_vectors` makes them of what is
        stored. Raises ValueError for more numbers than are stored."""
        dimension = self.shards[0].dimension
        if not 1 <= size <= dimension:
            raise ValueError(f"dimension is {size}, but the vectors in {self.folder} have {dimension} numbers")
        cut = (0, False) if size == dimension else (size, normalize)
        return EncodedCorpus(self.folder, self.parts, self.shards, self.selection, cut)

    def select_first(self, count: int) -> EncodedCorpus:
        """Return the corpus with the first `count` of its rows."""
        return self.select(np.arange(count) if self.selection is None else self.selection[:count])

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (first row, vectors [rows,V,D] or lists of them) of each shard."""
        for part, first in zip(self.shards, self.firsts):
            for shard in part.shards:
                begin, end = self._places(int(first) + shard.start, int(first) + shard.stop)
                if begin < end:  # else its files are not opened
                    rows = None if end - begin == shard.rows else self._chosen(begin, end) - (int(first) + shard.start)
                    vectors = _rows_of(part.map(shard), rows)
                    yield begin, (cut_shard(vectors, *self.cut) if self.cut[0] else vectors)

    def _places(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of this corpus that are among rows `start` to `stop` (excluded) of all parts."""
        if self.selection is None:
            return start, stop
        begin, end = np.searchsorted(self.selection, [start, stop])
        return int(begin), int(end)

    def _chosen(self, begin: int, end: int) -> np.ndarray:
        """Return rows `begin` to `end` (excluded) of this corpus, as all parts number them."""
        return np.arange(begin, end) if self.selection is None else self.selection[begin:end]

    def rows_in_range(self, number: int, count: int) -> tuple[int, int]:
        """Return the first row in one of `count` ranges of consecutive shards, and the first one behind it."""
        return self._places(*range_of_shards(self.shards, number, count))

    def in_range(self, number: int, count: int) -> tuple[int, EncodedCorpus]:
        """Return the corpus of the rows in one of `count` ranges of consecutive shards (`range_of_shards`), which may
        have none, and the number of rows before them."""
        begin, end = self.rows_in_range(number, count)
        return begin, EncodedCorpus(self.folder, self.parts, self.shards, self._chosen(begin, end), self.cut)

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return the passage ids of some rows. Reads one id file at a time and keeps only these ids. Raises IndexError
        for a row that the corpus does not have."""
        rows = np.asarray(indices, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.total_rows):
            wrong = rows[(rows < 0) | (rows >= self.total_rows)][0]
            raise IndexError(f"{self.folder}: row {wrong} is outside 0 to {self.total_rows - 1}")
        result = [""] * len(rows)
        for number, places, own_rows in self.by_part(rows):
            for place, key in zip(places, self.shards[number].ids(own_rows)):
                result[place] = key
        return result

    def require_unwritten(self, rows: np.ndarray) -> None:
        """Raise ShardError if a file of vectors of some rows was written to after it was mapped into memory."""
        for number, _, own_rows in self.by_part(rows):
            self.shards[number].require_unwritten(own_rows)

    def by_part(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (part, places of its rows among `rows`, these rows as the part numbers them)."""
        rows = rows if self.selection is None else self.selection[rows]
        part_of = np.searchsorted(self.firsts, rows, "right") - 1
        for number in np.unique(part_of).tolist():
            places = np.flatnonzero(part_of == number)
            yield number, places, rows[places] - self.firsts[number]

    def id_blocks(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (first row, passage ids) of a block of rows at a time, in order."""
        for start in range(0, self.total_rows, ROWS):
            yield start, self.ids(np.arange(start, min(start + ROWS, self.total_rows)))

    def describe(self, row: int) -> str:
        """Return the name of a row for messages: its number and its passage."""
        return f"passage row {row} ({self.ids([row])[0]!r} in {self.folder})"

    def missing_ids(self, ids: set[str]) -> set[str]:
        """Return those of the ids that no row has."""
        absent_ids = set(ids)
        for _, block in self.id_blocks():
            if not absent_ids:
                break
            absent_ids.difference_update(block)
        return absent_ids


_VERSION_FILES = ("manifest.json", "parts.json")  # that list the vectors


def corpus_state(folder: Path) -> list[FileState]:
    """Return the states of the files that list the vectors of an encoded corpus. They are read faster than
    `corpus_version`, and differ also after a file was written again with the same content."""
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


ROWS = 65_536  # whose ids are held at a time


def range_of_shards(parts: Sequence[ShardSet], number: int, count: int) -> tuple[int, int]:
    """Return the first row of all parts in the range `number` of `count` ranges of consecutive shards, and the first
    one behind it.

    Ranges have about equally many rows. Where there are fewer shards than ranges, some are empty.
    """
    ends = np.cumsum([0, *(shard.rows for part in parts for shard in part.shards)])
    begin, end = (int(ends[np.abs(ends * count - ends[-1] * each).argmin()]) for each in (number, number + 1))
    return begin, end


def open_encoded(folder: str | Path, verify: bool = True, only: tuple[int, int] = (0, 1)) -> EncodedCorpus:
    """Open an encoded corpus with all its parts. Checks rows, dtype, shapes and sizes, and with `verify` every digest.

    Args:
        folder: folder of the encoded corpus.
        verify: compare digests.
        only: (number, count) of the range of shards whose vectors are fetched and checked (`range_of_shards`).

    Raises ShardError naming the file that is missing, damaged, or not of this corpus.
    """
    folder = Path(folder)
    parts = read_parts(folder)
    shards = _open_range([folder / part.name for part in parts] or [folder], verify, *only)
    raise_file_limit(sum(each.mapped_files for each in shards))
    if not parts:
        sha256 = corpus_of(shards[0]).get("sha256", "")
        return EncodedCorpus(folder, [CorpusPart("", sha256, shards[0].total_rows)], shards, None)
    first = shards[0].manifest
    for part, each in zip(parts, shards):
        if (corpus_of(each).get("sha256"), each.total_rows) != (part.sha256, part.rows):
            raise ShardError(f"{each.folder}: its vectors are of other texts than {folder}/parts.json says")
        manifest = each.manifest
        if (manifest.layout, manifest.vectors_per_row, manifest.dimension, manifest.dtype) != (
            first.layout,
            first.vectors_per_row,
            first.dimension,
            first.dtype,
        ):
            raise ShardError(f"{each.folder}: its vectors have another shape or dtype than those of {folder}")
    mask = np.concatenate([part.present for part in parts])
    return EncodedCorpus(folder, parts, shards, None if mask.all() else np.flatnonzero(mask))


def _open_range(folders: Sequence[Path], verify: bool, number: int, count: int) -> list[ShardSet]:
    """Open folders of vectors, and check those shards of all that are in a range of them."""
    if count == 1:
        return [open_shards(folder, verify) for folder in folders]
    shard_sets = [read_shards(folder) for folder in folders]
    begin, end = range_of_shards(shard_sets, number, count)
    first = 0
    for each in shard_sets:
        each.check([shard for shard in each.shards if begin <= first + shard.start < end], verify)
        first += each.total_rows
    return shard_sets


def _rows_of(shard: Any, rows: np.ndarray | None) -> Any:
    """Return some rows of a shard; None: all."""
    if rows is None:
        return shard
    if isinstance(shard, SparseRows):
        return shard.take(rows)
    return RaggedRowSubset(shard, rows) if isinstance(shard, Ragged) else RowSubset(shard, rows)


def corpus_of(shards: ShardSet) -> dict[str, Any]:
    """Return the corpus entry of a folder of vectors; {} if it has none."""
    entry = shards.fingerprint.get("corpus")
    return entry if isinstance(entry, dict) else {}
