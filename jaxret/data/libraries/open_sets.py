"""Open a named set or one of its tables by the library that its path names."""

from __future__ import annotations

from pathlib import Path

from jaxret.data.errors import Location
from jaxret.data.libraries.hf import open_hf_set
from jaxret.data.libraries.irds import open_irds_set
from jaxret.data.libraries.named import NamedSet, Table, is_named, library_of
from jaxret.data.libraries.tfds import open_tfds_set


def open_named_set(path: Path) -> NamedSet:
    """Return the set of a path. Raises DataError if the library or the set is not on this machine."""
    library = library_of(path)[0]
    return {"tfds": open_tfds_set, "irds": open_irds_set, "hf": open_hf_set}[library](path)


def open_table(path: Path) -> Table:
    """Return the table of a path. Raises DataError if it is the path of a whole set."""
    named_set = open_named_set(path)
    if not (named_set.config and named_set.split):
        raise Location(path).error(
            "no table",
            f"this is all of {named_set.title}, not a table of it",
            f"name one of {named_set.describe_tables()}",
        )
    return named_set.open(named_set.config, named_set.split)


def is_whole_set(path: Path) -> bool:
    """Return whether a path names a whole set, without a table."""
    if not is_named(path):
        return False
    named_set = open_named_set(path)
    return not (named_set.config and named_set.split)


def list_files(path: Path) -> tuple[Path, ...]:
    """Return the files behind a path: the file itself, or those that a library reads a table from.

    Raises:
        DataError: the library does not say which files it reads.
    """
    if not is_named(path):
        return (path,)
    files = open_table(path).files
    if not files:
        problem = (
            f"{library_of(path)[0]} does not say which files this is read from, so nobody would see that it changed"
        )
        raise Location(path).error("no files", problem, "make files of it: jaxret data build SRC DIR")
    return files
