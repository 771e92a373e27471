"""Data sets that libraries keep, by name: tfds:NAME (TensorFlow Datasets), irds:NAME (ir_datasets), hf:NAME (datasets).

Readers treat a named set like a folder, and its tables like files. The passages of tfds:scifact are the table
passages/full with the path tfds:scifact/passages/full. Its rows are records, as in a JSON file.

Nothing is fetched. If a set is not on this machine, the error has the command of the library that fetches it. Digests
and times of a table are those of the files from which the library reads it (`Table.files`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location
from jaxret.data.records import Record

LIBRARIES = {"tfds": "tensorflow_datasets", "irds": "ir_datasets", "hf": "datasets"}
_EXTRAS = {"tfds": "data", "irds": "irds", "hf": "hf"}  # library -> the extra of jaxret that installs it
_NAME = re.compile(rf"({'|'.join(LIBRARIES)}):(?=.)")


@dataclass(frozen=True)
class Table:
    """Records of a split, in a fixed order."""

    title: str  # For messages
    rows: Callable[[], Iterator[Record]]  # Iterates over all records
    files: tuple[Path, ...]  # All files from which the library reads the records; () if the library does not name them
    # Reads records by row number; None if they cannot be read out of order
    rows_at: Callable[[Sequence[int]], list[Record]] | None = None
    count: int = 0  # Number of records, where `rows_at` can read them


@dataclass(frozen=True)
class NamedSet:
    """A data set on this machine."""

    root: Path  # The path as the user gave it, without table and split
    title: str  # Name and version for messages, such as "scifact 1.0.0 of TFDS"
    tables: Mapping[str, tuple[str, ...]]  # Table -> its splits
    open: Callable[[str, str], Table] = field(repr=False)  # Opens a split of a table
    config: str = ""  # The table that the path names after the root; "": none
    split: str = ""  # The split that the path names after the root; "": none

    def table_path(self, config: str, split: str) -> Path:
        return self.root / config / split

    def describe_tables(self) -> str:
        """Return the tables of the set in words, for an error."""
        return ", ".join(f"{config}/{split}" for config, splits in self.tables.items() for split in splits) or "none"

    def select(self, table_parts: Sequence[str]) -> NamedSet:
        """Return this set restricted to the last parts of a path: a table's name, a split, or both.

        Raises:
            DataError: the set has no such table or split.
        """
        if not table_parts:
            return self
        location = Location(self.root.joinpath(*table_parts))
        if table_parts[0] in self.tables:
            splits = self.tables[table_parts[0]]
            if len(table_parts) == 1:  # the only split of a table need not be named
                return replace(self, config=table_parts[0], split=splits[0] if len(splits) == 1 else "")
            if len(table_parts) == 2 and table_parts[1] in splits:
                return replace(self, config=table_parts[0], split=table_parts[1])
        elif len(table_parts) == 1 and any(table_parts[0] in splits for splits in self.tables.values()):
            return replace(self, split=table_parts[0])
        problem = f"{self.title} has no {'/'.join(table_parts)}"
        raise location.error("missing table", problem, f"its tables are: {self.describe_tables()}")


def is_named(path: Path) -> bool:
    """Return whether a path is the name of a named set or of one of its tables."""
    return bool(_NAME.match(str(path))) and not path.exists()


def library_of(path: Path) -> tuple[str, str]:
    """Return ("hf", "owner/name") of hf:owner/name."""
    library, _, name = str(path).partition(":")
    return library, name


def set_name(path: Path) -> str:
    """Return the name of a set in file names of results: "beir-scifact-test" for irds:beir/scifact/test, and
    "scifact-test" for the folder tfds:d/scifact/test."""
    parts = Path(library_of(path)[1]).expanduser().parts
    local = next((count for count in range(len(parts), 0, -1) if Path(*parts[:count]).exists()), 0)
    if local:
        parts = (Path(*parts[:local]).absolute().name, *parts[local:])
    return re.sub(r"[^\w.]+", "-", "-".join(parts)).strip("-")


def import_library(path: Path) -> Any:
    """Import the library of a path. Raises DataError with the command that installs it."""
    library = library_of(path)[0]
    try:
        return importlib.import_module(LIBRARIES[library])
    except ImportError as error:
        remedy = f"pip install 'jaxret[{_EXTRAS[library]}]'"
        problem = f"{library}: needs a package that is not installed ({error})"
        raise Location(path).error("missing package", problem, remedy) from error


def missing_set_error(path: Path, problem: str, fetch: str) -> DataError:
    """Return the error for a set that is not on this machine."""
    return Location(path).error("missing set", f"{problem}, and nothing is fetched here", f"fetch it with: {fetch}")
