"""Open a named set or one of its tables by the library that its path names."""

from __future__ import annotations

from pathlib import Path

from jaxret.data.errors import Location
from jaxret.data.libraries.hf import open_hf_set
from jaxret.data.libraries.irds import open_irds_set
from jaxret.data.libraries.named import NamedSet, Table, is_named, library_of
from jaxret.data.libraries.tfds import open_tfds_set


def open_named_set(path: Path) -> NamedSet:
    """Open the named set of a path. Raises DataError if the library or the set is not on this machine."""
    library = library_of(path)[0]
    return {"tfds": open_tfds_set, "irds": open_irds_set, "hf": open_hf_set}[library](path)


def open_table(path: Path) -> Table:
    """Open the table of a path. Raises DataError if it is the path of a whole set."""
    named_set = open_named_set(path)
    if not (named_set.config and named_set.split):
        raise Location(path).error(
            "no table",
            f"this is the whole set {named_set.title}, not one of its tables",
            f"name a table: {named_set.describe_tables()}",
        )
    return named_set.open(named_set.config, named_set.split)


def list_files(path: Path) -> tuple[Path, ...]:
    """Return the files behind a path: the file itself, or the files from which a library reads a table.

    Raises:
        DataError: the library does not say which files it reads.
    """
    if not is_named(path):
        return (path,)
    files = open_table(path).files
    if not files:
        problem = f"{library_of(path)[0]} does not say from which files it reads this, so a change would not be noticed"
        raise Location(path).error("no files", problem, "write it to files: jaxret data build SRC DIR")
    return files
