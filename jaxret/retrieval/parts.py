"""What an encoded corpus consists of: what was encoded first, what was appended since, less what was deleted.

<corpus>/manifest.json ...         the first part: a finished folder of vectors (`shards.py`)
         part-00001-0123456789ab/  one that was appended, named by its number and the digest of its texts: another
         parts.json                written last, whole: the parts in order, and which rows of each were deleted

Without parts.json there is the first part alone, with all its rows. Nothing that is not named there is read, so a job
that was killed leaves the corpus as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxret import storage
from jaxret.retrieval.shards import ShardError
from jaxret.storage import sealed, sha256_json, write_json

_NAME = re.compile(r"part-\d{5}-[0-9a-f]{12}")
_REMEDY = "restore it, or delete it: then what was appended and deleted is as it was before"
_NONE = np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class Part:
    """A folder of vectors that belongs to a corpus. name: "" for the first; sha256: of the texts it was made from;
    deleted: the rows from [n,0] to below [n,1], int64 [n,2], ascending."""

    name: str
    sha256: str
    rows: int
    deleted: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def kept(self) -> np.ndarray:
        """Which rows are there, bool [rows]."""
        kept = np.ones(self.rows, bool)
        for start, stop in self.deleted:
            kept[start:stop] = False
        return kept

    def without(self, rows: Iterable[int]) -> Part:
        """The same with these rows deleted too."""
        kept = self.kept
        kept[np.fromiter(rows, np.int64)] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[True], kept, [True]])))
        return Part(self.name, self.sha256, self.rows, edges.reshape(-1, 2).astype(np.int64))

    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "rows": self.rows, "deleted": self.deleted.tolist()}


def part_name(number: int, sha256: str) -> str:
    """The folder of the part that is appended as this number: the same job has the same, another has another."""
    return f"part-{number:05d}-{sha256[:12]}"


def read_parts(folder: Path) -> list[Part]:
    """The parts in the order of their rows; [] where there is no parts.json. Raises ShardError."""
    path = folder / "parts.json"
    try:
        found = storage.read_sealed(path).get("parts")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ShardError(f"{error}; {_REMEDY}") from error
    entries = found if isinstance(found, list) else []
    parts = [_part(entry, first=number == 0) for number, entry in enumerate(entries)]
    if not parts or None in parts:
        raise ShardError(f"{path}: its parts are not what is written there; {_REMEDY}")
    return [part for part in parts if part]


def _part(entry: Any, first: bool) -> Part | None:
    """The part of an entry; None if it makes no sense."""
    kinds = {"name": str, "sha256": str, "rows": int, "deleted": list}
    if not isinstance(entry, dict) or {k: type(v) for k, v in entry.items()} != kinds:
        return None
    if entry["name"] if first else not _NAME.fullmatch(entry["name"]):
        return None
    pairs = entry["deleted"]
    edges = [edge for pair in pairs if isinstance(pair, list) and len(pair) == 2 for edge in pair]
    whole = len(edges) == 2 * len(pairs) and all(type(edge) is int for edge in edges)
    if not whole or any(a >= b for a, b in zip([-1, *edges], [*edges, entry["rows"] + 1])):
        return None
    return Part(entry["name"], entry["sha256"], entry["rows"], np.array(edges, np.int64).reshape(-1, 2))


def write_parts(folder: Path, parts: Iterable[Part]) -> None:
    """From then on the corpus consists of these."""
    write_json(folder / "parts.json", sealed({"parts": [part.entry() for part in parts]}))


def identity(parts: Iterable[Part]) -> dict[str, Any]:
    """{"sha256", "passages"} of a corpus: of its texts, where it is one part and nothing was deleted; else of what
    parts.json says."""
    parts = list(parts)
    if len(parts) == 1 and not len(parts[0].deleted):
        return {"sha256": parts[0].sha256, "passages": parts[0].rows}
    passages = sum(int(part.kept.sum()) for part in parts)
    return {"sha256": sha256_json([part.entry() for part in parts]), "passages": passages}
