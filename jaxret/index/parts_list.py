"""The parts of an encoded corpus: the first encoding, and passages that were appended later.

<corpus>/manifest.json ...         the first part: a finished folder of vectors (`shards.py`)
         part-00001-0123456789ab/  an appended part, named by its number and the digest of its texts
         parts.json                written last: the parts in order, and the deleted rows of each

Without parts.json the corpus is the first part with all its rows. Folders that parts.json does not name are never read,
so a killed job leaves the corpus unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.shards import ShardError
from jaxret.storage import atomic
from jaxret.storage.atomic import sha256_json, with_digest, write_json

_NAME = re.compile(r"part-\d{5}-[0-9a-f]{12}")
_REMEDY = "restore it, or delete it, which undoes all appends and deletions"
_NONE = np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class CorpusPart:
    """A folder of vectors that belongs to a corpus."""

    name: str  # "" for the first part
    sha256: str  # digest of its texts
    rows: int  # number of passages, deleted ones included
    # ranges of deleted rows (first row, row after the last one), int64 [n,2], ascending
    deletions: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def present(self) -> np.ndarray:
        """Whether each row is not deleted, bool [rows]."""
        mask = np.ones(self.rows, bool)
        for start, stop in self.deletions:
            mask[start:stop] = False
        return mask

    def with_deleted(self, rows: Iterable[int]) -> CorpusPart:
        """Return the part with these rows also deleted."""
        mask = self.present
        mask[np.fromiter(rows, np.int64)] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[True], mask, [True]])))
        return CorpusPart(self.name, self.sha256, self.rows, edges.reshape(-1, 2).astype(np.int64))

    def entry(self) -> dict[str, Any]:
        """Return the part as a JSON value."""
        return {"name": self.name, "sha256": self.sha256, "rows": self.rows, "deleted": self.deletions.tolist()}


def part_name(number: int, sha256: str) -> str:
    """Return the folder of an appended part. Its name depends on the texts, so a repeated job uses the same folder."""
    return f"part-{number:05d}-{sha256[:12]}"


def read_parts(folder: Path) -> list[CorpusPart]:
    """Return the parts in the order of their rows, or [] without parts.json. Raises ShardError if it is damaged."""
    path = folder / "parts.json"
    try:
        value = atomic.read_with_digest(path).get("parts")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ShardError(f"{error}; {_REMEDY}") from error
    entries = value if isinstance(value, list) else []
    parts = [_part(entry, first=number == 0) for number, entry in enumerate(entries)]
    if not parts or None in parts:
        raise ShardError(f"{path}: an entry of its parts is not valid; {_REMEDY}")
    return [part for part in parts if part]


def _part(entry: Any, first: bool) -> CorpusPart | None:
    """Return the part of an entry, or None if the entry is not valid."""
    kinds = {"name": str, "sha256": str, "rows": int, "deleted": list}
    if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != kinds:
        return None
    if entry["name"] if first else not _NAME.fullmatch(entry["name"]):
        return None
    pairs = entry["deleted"]
    edges = [edge for pair in pairs if isinstance(pair, list) and len(pair) == 2 for edge in pair]
    are_pairs = len(edges) == 2 * len(pairs) and all(type(edge) is int for edge in edges)
    if not are_pairs or any(a >= b for a, b in zip([-1, *edges], [*edges, entry["rows"] + 1])):
        return None
    return CorpusPart(entry["name"], entry["sha256"], entry["rows"], np.array(edges, np.int64).reshape(-1, 2))


def write_parts(folder: Path, parts: Iterable[CorpusPart]) -> None:
    """Write parts.json: from then on the corpus consists of these parts."""
    write_json(folder / "parts.json", with_digest({"parts": [part.entry() for part in parts]}))


def parts_identity(parts: Iterable[CorpusPart]) -> dict[str, Any]:
    """Return {"sha256", "passages"} of a corpus. The digest is computed from its texts if it is one part without
    deletions, otherwise from the list of parts."""
    parts = list(parts)
    if len(parts) == 1 and not len(parts[0].deletions):
        return {"sha256": parts[0].sha256, "passages": parts[0].rows}
    passages = sum(int(part.present.sum()) for part in parts)
    return {"sha256": sha256_json([part.entry() for part in parts]), "passages": passages}
