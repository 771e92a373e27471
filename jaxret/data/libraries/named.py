"""Data sets that libraries keep, by name: tfds:NAME (TensorFlow Datasets), irds:NAME (ir_datasets), hf:NAME (datasets).

A named set is to a reader what a folder is, and its tables are what files are: the passages of tfds:scifact are the
table passages/full, whose place is the path tfds:scifact/passages/full, and whose rows are records like those of files.

Nothing is fetched: a set that is not on this machine is an error that says how the library fetches it. Nothing is
believed because of its name: what stands for a table are the files that the library reads it from (`Table.files`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxret.data.files import DataError, Where

Record = dict[str, Any]
LIBRARIES = {"tfds": "tensorflow_datasets", "irds": "ir_datasets", "hf": "datasets"}
_PACKAGES = {"tfds": "tensorflow-datasets array_record", "irds": "ir_datasets", "hf": "datasets"}  # as pip calls them
_NAMED = re.compile(rf"({'|'.join(LIBRARIES)}):(?=.)")


@dataclass(frozen=True)
class Table:
    """Records, in an order that stays. files: what they are read from, all of it; () if the library does not say.
    at: the records of some rows, of so many, where they can be read out of order."""

    title: str
    rows: Callable[[], Iterator[Record]]
    files: tuple[Path, ...]
    at: Callable[[Sequence[int]], list[Record]] | None = None
    count: int = 0


@dataclass(frozen=True)
class NamedSet:
    """A set that is on this machine. root: its path, as it was asked for; tables: by name, their splits; config, split:
    what the path says beyond the root."""

    root: Path
    title: str  # "scifact 1.0.0 of TFDS"
    tables: Mapping[str, tuple[str, ...]]
    open: Callable[[str, str], Table] = field(repr=False)
    config: str = ""
    split: str = ""

    def place(self, config: str, split: str) -> Path:
        """The path of a table."""
        return self.root / config / split

    def told(self) -> str:
        """Its tables, for an error."""
        return ", ".join(f"{config}/{split}" for config, splits in self.tables.items() for split in splits) or "none"

    def asked(self, rest: Sequence[str]) -> NamedSet:
        """The same, of which the path goes on with these parts: a table's name, a split, or both. Raises DataError for
        what it does not have."""
        if not rest:
            return self
        place = Where(self.root.joinpath(*rest))
        if rest[0] in self.tables:
            splits = self.tables[rest[0]]
            if len(rest) == 1:  # the only split of a table need not be named
                return replace(self, config=rest[0], split=splits[0] if len(splits) == 1 else "")
            if len(rest) == 2 and rest[1] in splits:
                return replace(self, config=rest[0], split=rest[1])
        elif len(rest) == 1 and any(rest[0] in splits for splits in self.tables.values()):
            return replace(self, split=rest[0])
        found = f"{self.title} has no {'/'.join(rest)}"
        raise place.error("missing table", found, f"its tables are {self.told()}")


def is_named(path: Path) -> bool:
    """Whether a path is the name of a set, or of a table of one."""
    return bool(_NAMED.match(str(path))) and not path.exists()


def library_of(path: Path) -> tuple[str, str]:
    """("hf", "owner/name") of hf:owner/name."""
    name, _, rest = str(path).partition(":")
    return name, rest


def opened(path: Path) -> NamedSet:
    """The set of a path. Raises DataError if the library or the set is not on this machine."""
    library = library_of(path)[0]
    found: NamedSet = importlib.import_module(f"jaxret.data.libraries.{library}").open_set(path)
    return found


def table(path: Path) -> Table:
    """The table of a path. Raises DataError if it is the path of a whole set."""
    found = opened(path)
    if not (found.config and found.split):
        raise Where(path).error(
            "no table", f"this is all of {found.title}, not a table of it", f"name one of {found.told()}"
        )
    return found.open(found.config, found.split)


def is_whole(path: Path) -> bool:
    """Whether a path names a set, of whose tables none is named."""
    if not is_named(path):
        return False
    found = opened(path)
    return not (found.config and found.split)


def called(path: Path) -> str:
    """What results are called after: "beir-scifact-test" of irds:beir/scifact/test, "scifact-test" of
    tfds:/data/scifact/test."""
    parts = Path(library_of(path)[1]).expanduser().parts
    local = next((count for count in range(len(parts), 0, -1) if Path(*parts[:count]).exists()), 0)
    if local:
        parts = (Path(*parts[:local]).absolute().name, *parts[local:])
    return re.sub(r"[^\w.]+", "-", "-".join(parts)).strip("-")


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that hold what is at a path: that file, or those that a library reads a table from. Raises DataError
    where it does not say."""
    if not is_named(path):
        return (path,)
    files = table(path).files
    if not files:
        found = f"{library_of(path)[0]} does not say which files this is read from, so nobody would see that it changed"
        raise Where(path).error("no files", found, "make files of it: jaxret data build SRC DIR")
    return files


def module(path: Path) -> Any:
    """The library of a path. Raises DataError with the line that installs it."""
    library = library_of(path)[0]
    try:
        return importlib.import_module(LIBRARIES[library])
    except ImportError as error:
        remedy = f"pip install {_PACKAGES[library]}"
        found = f"{library}: needs a package that is not here ({error})"
        raise Where(path).error("missing package", found, remedy) from error


def absent(path: Path, found: str, fetch: str) -> DataError:
    """The error for a set that is not on this machine."""
    return Where(path).error("missing set", f"{found}, and nothing is fetched here", f"fetch it with: {fetch}")
