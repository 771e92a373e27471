"""The parts of an encoded corpus: the first encoding, and later appended passages, without deleted ones.

<corpus>/manifest.json ...         the first part: a finished folder of vectors (`shards.py`)
         part-00001-0123456789ab/  an appended part, named by its number and the digest of its texts
         parts.json                written last, whole: the parts in order, and which rows of each were deleted

Without parts.json there is the first part alone, with all its rows. Folders that parts.json does not name are never
read, so a job that was killed leaves the corpus as it was.
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
_REMEDY = "restore it, or delete it: then what was appended and deleted is as it was before"
_NONE = np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class CorpusPart:
    """A folder of vectors that belongs to a corpus."""

    name: str  # "" for the first part
    sha256: str  # of its texts
    rows: int  # passages, deleted ones included
    # the rows from [n,0] to below [n,1], int64 [n,2], ascending
    deletions: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def present(self) -> np.ndarray:
        """Return which rows are not deleted, bool [rows]."""
        mask = np.ones(self.rows, bool)
        for start, stop in self.deletions:
            mask[start:stop] = False
        return mask

    def with_deleted(self, rows: Iterable[int]) -> CorpusPart:
        """Return the part with these rows deleted too."""
        mask = self.present
        mask[np.fromiter(rows, np.int64)] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[True], mask, [True]])))
        return CorpusPart(self.name, self.sha256, self.rows, edges.reshape(-1, 2).astype(np.int64))

    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "rows": self.rows, "deleted": self.deletions.tolist()}


def part_name(number: int, sha256: str) -> str:
    """Return the folder of an appended part: the same for the same job, another for another."""
    return f"part-{number:05d}-{sha256[:12]}"


def read_parts(folder: Path) -> list[CorpusPart]:
    """Return the parts in the order of their rows; [] where there is no parts.json. Raises ShardError."""
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
        raise ShardError(f"{path}: its parts are not what is written there; {_REMEDY}")
    return [part for part in parts if part]


def _part(entry: Any, first: bool) -> CorpusPart | None:
    """Return the part of an entry; None if the entry is not valid."""
    kinds = {"name": str, "sha256": str, "rows": int, "deleted": list}
    if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != kinds:
        return None
    if entry["name"] if first else not _NAME.fullmatch(entry["name"]):
        return None
    pairs = entry["deleted"]
    edges = [edge for pair in pairs if isinstance(pair, list) and len(pair) == 2 for edge in pair]
    whole = len(edges) == 2 * len(pairs) and all(type(edge) is int for edge in edges)
    if not whole or any(a >= b for a, b in zip([-1, *edges], [*edges, entry["rows"] + 1])):
        return None
    return CorpusPart(entry["name"], entry["sha256"], entry["rows"], np.array(edges, np.int64).reshape(-1, 2))


def write_parts(folder: Path, parts: Iterable[CorpusPart]) -> None:
    """Write parts.json: from then on the corpus consists of these parts."""
    write_json(folder / "parts.json", with_digest({"parts": [part.entry() for part in parts]}))


def parts_identity(parts: Iterable[CorpusPart]) -> dict[str, Any]:
    """Return {"sha256", "passages"} of a corpus: the digest of its texts, where it is one part and nothing was deleted;
    else that of the list of parts."""
    parts = list(parts)
    if len(parts) == 1 and not len(parts[0].deletions):
        return {"sha256": parts[0].sha256, "passages": parts[0].rows}
    passages = sum(int(part.present.sum()) for part in parts)
    return {"sha256": sha256_json([part.entry() for part in parts]), "passages": passages}
