"""Folders with a folder for each data set, as in BEIR. A set may have members, such as CQADupStack's twelve forums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxret.data.errors import Location
from jaxret.data.formats.source_layout import FolderLayout
from jaxret.data.libraries.named import is_named

SetFolders = Mapping[str, Mapping[str, Path]]  # set -> name of a member -> its folder; a plain set is its own member


def list_sets(folder: Path) -> dict[str, dict[str, Path]]:
    """Return the data sets in a folder, by name.

    A set is a folder with passages. A folder of such folders is a set, too; its members are named SET-FOLDER. Files and
    folders without passages are ignored.

    Raises:
        DataError: the folder does not exist, is a data set itself, or has no data set.
    """
    location = Location(folder)
    if not folder.is_dir():
        raise location.error("missing folder", "this folder does not exist", "give a folder with a folder for each set")
    if has_passages(folder):
        remedy = f"give its parent folder: {folder.absolute().parent}"
        raise location.error("one data set", "this is one data set, not a folder of several", remedy)
    if sets := _sets(folder):
        return sets
    remedy = "a set is a folder with corpus.jsonl, queries.jsonl and qrels/"
    raise location.error("no data set", "no folder in it has passages", remedy)


def _sets(folder: Path) -> dict[str, dict[str, Path]]:
    sets: dict[str, dict[str, Path]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        if has_passages(path):
            sets[path.name] = {path.name: path}
        elif forums := {f"{path.name}-{f.name}": f for f in sorted(path.iterdir()) if f.is_dir() and has_passages(f)}:
            sets[path.name] = forums
    return sets


def is_folder_of_sets(folder: Path) -> bool:
    """Return whether a folder has no passages itself, but folders in it have passages."""
    return not is_named(folder) and folder.is_dir() and not has_passages(folder) and bool(_sets(folder))


def has_passages(folder: Path) -> bool:
    """Return whether a folder has a file of passages."""
    return FolderLayout(folder).find_passages() is not None


def unjudged_members(members: Mapping[str, Path], split: str) -> list[str]:
    """Return the names of a set's members that have no judgements of a split."""
    return [name for name, path in members.items() if not FolderLayout(path).find_judgements(split)]
