"""An encoded corpus as search sees it: the rows of all its parts that are there, counted one after the other.

What was deleted, or is outside a filter, is no row: it is left out before anything is scored, so the proof of a search
is about the rows that are there, and its result is that of a corpus which holds nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.retrieval.parts import Part, identity, read_parts
from jaxret.retrieval.picked import Picked, PickedLists
from jaxret.retrieval.shard_set import ShardSet, let_map, open_shards
from jaxret.retrieval.shards import ShardError
from jaxret.types import Ragged


class EncodedCorpus:
    """The rows of some folders of vectors that are there. `shards`: one ShardSet a part; `chosen`: their rows, counted
    through all parts, int64 ascending (None: all of them)."""

    def __init__(self, folder: Path, parts: list[Part], shards: list[ShardSet], chosen: np.ndarray | None) -> None:
        self.folder, self.parts, self.shards, self.chosen = folder, parts, shards, chosen
        self.firsts = np.cumsum([0, *(each.total_rows for each in shards)])  # first row of each part

    @property
    def total_rows(self) -> int:
        return int(self.firsts[-1]) if self.chosen is None else len(self.chosen)

    @property
    def dimension(self) -> int:
        return self.shards[0].dimension

    @property
    def ragged(self) -> bool:
        """Whether every row has its own number of vectors."""
        return self.shards[0].ragged

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the first part was made from; contract and checkpoint are those of all."""
        return self.shards[0].fingerprint

    @property
    def corpus(self) -> dict[str, Any]:
        """{"sha256", "passages"} of what is there, filtered or not: what results record."""
        return identity(self.parts)

    @property
    def bytes_per_passage(self) -> float:
        """Of vectors on disk, and of where each passage's begin; of ids and digests none."""
        entries = [entry for each in self.shards for entry in each.manifest.shards]
        sizes = (entry[name]["bytes"] for entry in entries for name in ("vectors", "offsets") if name in entry)
        return sum(sizes) / int(self.firsts[-1])

    def only(self, rows: np.ndarray) -> EncodedCorpus:
        """Those of the rows that are there. rows: counted through all parts, deleted ones too; int64 ascending."""
        chosen = rows if self.chosen is None else np.intersect1d(self.chosen, rows, assume_unique=True)
        return EncodedCorpus(self.folder, self.parts, self.shards, chosen)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """(first row, vectors [rows,V,D] or lists of them) of each shard."""
        for part, first in zip(self.shards, self.firsts):
            for start, shard in part:
                yield from self._there(int(first) + start, shard)

    def _there(self, start: int, shard: Any) -> Iterator[tuple[int, Any]]:
        """The rows of a shard, which begins at `start` of all parts, that are there."""
        if self.chosen is None:
            yield start, shard
            return
        begin, end = (int(place) for place in np.searchsorted(self.chosen, [start, start + len(shard)]))
        if end - begin == len(shard):
            yield begin, shard
        elif begin < end:
            rows = self.chosen[begin:end] - start
            yield begin, PickedLists(shard, rows) if isinstance(shard, Ragged) else Picked(shard, rows)

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The passage ids of some rows. Reads one id file at a time and keeps the ids asked for only."""
        rows = np.asarray(indices, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.total_rows):
            wrong = rows[(rows < 0) | (rows >= self.total_rows)][0]
            raise IndexError(f"{self.folder}: row {wrong} is outside 0 to {self.total_rows - 1}")
        rows = rows if self.chosen is None else self.chosen[rows]
        part_of = np.searchsorted(self.firsts, rows, "right") - 1
        found = [""] * len(rows)
        for number in np.unique(part_of):
            places = np.flatnonzero(part_of == number)
            for place, key in zip(places, self.shards[number].ids(rows[places] - self.firsts[number])):
                found[place] = key
        return found

    def id_blocks(self) -> Iterator[tuple[int, list[str]]]:
        """(first row, passage ids) of some rows at a time, in order."""
        for start in range(0, self.total_rows, ROWS):
            yield start, self.ids(np.arange(start, min(start + ROWS, self.total_rows)))

    def describe(self, row: int) -> str:
        """What a message calls a row: its number and its passage."""
        return f"document row {row} (passage {self.ids([row])[0]!r} in {self.folder})"

    def without(self, wanted: set[str]) -> set[str]:
        """Those of the ids that no row has."""
        missing = set(wanted)
        for _, ids in self.id_blocks():
            if not missing:
                break
            missing.difference_update(ids)
        return missing


ROWS = 65_536  # whose ids are held at a time


def open_encoded(folder: str | Path, verify: bool = True) -> EncodedCorpus:
    """Opens an encoded corpus with all its parts. Checks rows, dtype, shapes and sizes, and with `verify` every digest.

    Raises ShardError naming the file that is missing, damaged, or not of this corpus.
    """
    folder = Path(folder)
    parts = read_parts(folder)
    shards = [open_shards(folder / part.name, verify) for part in parts] or [open_shards(folder, verify)]
    let_map(sum(len(each.shards) for each in shards))
    if not parts:
        sha256 = corpus_of(shards[0]).get("sha256", "")
        return EncodedCorpus(folder, [Part("", sha256, shards[0].total_rows)], shards, None)
    first = shards[0].manifest
    for part, each in zip(parts, shards):
        if (corpus_of(each).get("sha256"), each.total_rows) != (part.sha256, part.rows):
            raise ShardError(f"{each.folder}: its vectors are of other texts than {folder}/parts.json says")
        found = each.manifest
        if (found.layout, found.vectors_per_row, found.dimension, found.dtype) != (
            first.layout,
            first.vectors_per_row,
            first.dimension,
            first.dtype,
        ):
            raise ShardError(f"{each.folder}: its vectors have another shape or dtype than those of {folder}")
    kept = np.concatenate([part.kept for part in parts])
    return EncodedCorpus(folder, parts, shards, None if kept.all() else np.flatnonzero(kept))


def corpus_of(shards: ShardSet) -> dict[str, Any]:
    """What a folder of vectors says of its texts; {} if nothing."""
    found = shards.fingerprint.get("corpus")
    return found if isinstance(found, dict) else {}
