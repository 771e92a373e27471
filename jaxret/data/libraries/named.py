"""Data sets that libraries keep, by name: tfds:NAME (TensorFlow Datasets), irds:NAME (ir_datasets), hf:NAME (datasets).

A named set is to a reader what a folder is, and its tables are what files are: the passages of tfds:scifact are the
table passages/full, whose place is the path tfds:scifact/passages/full, and whose rows are records like those of files.

Nothing is fetched: a set that is not on this machine is an error with the library's command that fetches it. A table is
identified by the files that the library reads it from, and not by its name (`Table.files`).
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
_PACKAGES = {"tfds": "tensorflow-datasets array_record", "irds": "ir_datasets", "hf": "datasets"}  # as pip calls them
_NAME = re.compile(rf"({'|'.join(LIBRARIES)}):(?=.)")


@dataclass(frozen=True)
class Table:
    """Records of a split, in a fixed order."""

    title: str  # For messages
    rows: Callable[[], Iterator[Record]]  # Iterates over all records
    files: tuple[Path, ...]  # All files that they are read from; () if the library does not say
    # Reads records by row number; None if they cannot be read out of order
    rows_at: Callable[[Sequence[int]], list[Record]] | None = None
    count: int = 0  # Number of records, where `rows_at` can read them


@dataclass(frozen=True)
class NamedSet:
    """A data set on this machine."""

    root: Path  # Its path, as it was requested
    title: str  # "scifact 1.0.0 of TFDS"
    tables: Mapping[str, tuple[str, ...]]  # Table -> its splits
    open: Callable[[str, str], Table] = field(repr=False)  # Opens a split of a table
    config: str = ""  # The table that the path names after the root; "": none
    split: str = ""  # The split that the path names after the root; "": none

    def table_path(self, config: str, split: str) -> Path:
        return self.root / config / split

    def describe_tables(self) -> str:
        """Return its tables, for an error."""
        return ", ".join(f"{config}/{split}" for config, splits in self.tables.items() for split in splits) or "none"

    def select(self, rest: Sequence[str]) -> NamedSet:
        """Return this set restricted to the further parts of a path: a table's name, a split, or both.

        Raises:
            DataError: there is no such table or split.
        """
        if not rest:
            return self
        location = Location(self.root.joinpath(*rest))
        if rest[0] in self.tables:
            splits = self.tables[rest[0]]
            if len(rest) == 1:  # the only split of a table need not be named
                return replace(self, config=rest[0], split=splits[0] if len(splits) == 1 else "")
            if len(rest) == 2 and rest[1] in splits:
                return replace(self, config=rest[0], split=rest[1])
        elif len(rest) == 1 and any(rest[0] in splits for splits in self.tables.values()):
            return replace(self, split=rest[0])
        problem = f"{self.title} has no {'/'.join(rest)}"
        raise location.error("missing table", problem, f"its tables are {self.describe_tables()}")


def is_named(path: Path) -> bool:
    """Return whether a path is the name of a set, or of a table of one."""
    return bool(_NAME.match(str(path))) and not path.exists()


def library_of(path: Path) -> tuple[str, str]:
    """Return ("hf", "owner/name") of hf:owner/name."""
    name, _, rest = str(path).partition(":")
    return name, rest


def set_name(path: Path) -> str:
    """Return the name that results have: "beir-scifact-test" of irds:beir/scifact/test, "scifact-test" of
    tfds:d/scifact/test."""
    parts = Path(library_of(path)[1]).expanduser().parts
    local = next((count for count in range(len(parts), 0, -1) if Path(*parts[:count]).exists()), 0)
    if local:
        parts = (Path(*parts[:local]).absolute().name, *parts[local:])
    return re.sub(r"[^\w.]+", "-", "-".join(parts)).strip("-")


def import_library(path: Path) -> Any:
    """Import the library of a path. Raises DataError with the line that installs it."""
    library = library_of(path)[0]
    try:
        return importlib.import_module(LIBRARIES[library])
    except ImportError as error:
        remedy = f"pip install {_PACKAGES[library]}"
        problem = f"{library}: needs a package that is not here ({error})"
        raise Location(path).error("missing package", problem, remedy) from error


def missing_set_error(path: Path, problem: str, fetch: str) -> DataError:
    """Return the error for a set that is not on this machine."""
    return Location(path).error("missing set", f"{problem}, and nothing is fetched here", f"fetch it with: {fetch}")
