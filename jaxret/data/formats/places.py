"""Which file of a folder, or table of a named set, holds what: by its name; a table of another name by its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxret.data.files import DataError, Where
from jaxret.data.formats import folders
from jaxret.data.formats.recognise import recognise
from jaxret.data.libraries.named import NamedSet, is_named, is_whole, opened

_TABLES = {  # what tables are called in whose names their role is
    "passages": ("passages", "corpus", "documents", "collection", "docs"),
    "queries": ("queries", "topics"),
    "judgements": ("judgements", "qrels"),
    "examples": ("examples", "docpairs"),
    "rankings": ("rankings", "scoreddocs", "top_ranked"),
}
_ALL = ("full", "corpus", "queries", "train")  # which split of a table is all there is, where there are several


def is_folder(path: Path) -> bool:
    """Whether a path is one of many files or tables, of which each holds something else."""
    return is_whole(path) if is_named(path) else path.is_dir()


def home(path: Path) -> Path:
    """Where the texts are that a file or table names by ids."""
    return opened(path).root if is_named(path) else path.absolute().parent


def passages_in(folder: Path) -> Path:
    """Raises DataError if there is none."""
    return _require(folder, "passages", None) if is_named(folder) else folders.passages_in(folder)


def has_passages(folder: Path) -> bool:
    """Whether there is a corpus."""
    return (_table(opened(folder), "passages", None) if is_named(folder) else folders.corpus_in(folder)) is not None


def queries_in(folder: Path, split: str | None = None) -> list[Path]:
    """Those of all queries, or of the split; without a split, of all of them. Raises DataError if there is none."""
    if not is_named(folder):
        return folders.queries_in(folder, split)
    found = opened(folder)
    if split is None and not found.split:
        for config in _candidates(found, "queries"):
            return [found.place(config, one) for one in found.tables[config]]
    return [_require(folder, "queries", split)]


def judgements_in(folder: Path, split: str | None) -> Path:
    """The judgements of a split; else its training records, whose positives they are. Raises DataError if there is
    neither, or no split was named."""
    if not is_named(folder):
        return folders.judgements_in(folder, split)
    return _table(opened(folder), "judgements", split) or _require(folder, "examples", split)


def has_judgements(folder: Path, split: str) -> bool:
    """Whether a split has judgements of its own."""
    if is_named(folder):
        return _table(opened(folder), "judgements", split) is not None
    return folders.own_judgements_in(folder, split) is not None


def examples_in(folder: Path, split: str | None) -> Path | None:
    """The training records of a split, if there are any."""
    return _table(opened(folder), "examples", split) if is_named(folder) else folders.examples_in(folder, split)


def rankings_in(folder: Path) -> Path:
    """What a named set ranked for each query. Raises DataError if there is none."""
    return _require(folder, "rankings", None)


def splits_in(folder: Path) -> list[str]:
    """The splits of judgements or training records."""
    if not is_named(folder):
        return folders.splits_in(folder)
    found = opened(folder)
    roles = [config for role in ("judgements", "examples") for config in _candidates(found, role)]
    splits = dict.fromkeys(split for config in roles for split in found.tables[config])
    return [split for split in splits if found.split in ("", split)]


def _require(folder: Path, role: str, split: str | None) -> Path:
    found = opened(folder)
    place = _table(found, role, split)
    if place is None:
        of = f" of {split}" if split else ""
        remedy = f"its tables are {found.told()}; name one, as {found.root}/TABLE/SPLIT"
        raise Where(folder).error("missing table", f"{found.title} has no {role}{of}", remedy)
    return place


def _table(found: NamedSet, role: str, split: str | None) -> Path | None:
    """The table of a split: of the one that the set's path names, if it does. Passages and queries may be in a table
    that is for all splits."""
    split = found.split or split
    for config in _candidates(found, role):
        splits = found.tables[config]
        if split in splits:
            return found.place(config, split or "")
        if role in ("passages", "queries", "rankings"):
            for one in splits if len(splits) == 1 else (name for name in _ALL if name in splits):
                return found.place(config, one)
    return None


def _candidates(found: NamedSet, role: str) -> Iterator[str]:
    """The tables that may hold it: those called so, then those whose names say nothing and whose rows do."""
    mine = [found.config] if found.config else list(found.tables)
    yield from (name for name in _TABLES[role] if name in mine)
    known = {name for names in _TABLES.values() for name in names}
    for config in mine:
        if config not in known and found.tables[config] and _gives(found.place(config, found.tables[config][0]), role):
            yield config


def _gives(place: Path, role: str) -> bool:
    try:
        found = recognise(place)
    except DataError as error:
        if error.reason in ("unknown format", "wrong format"):
            return False
        raise
    if role == "examples":
        return found.format.examples is not None or found.format.named is not None
    return found.format.gives(role)
