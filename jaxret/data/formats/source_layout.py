"""Find the file of a folder, or the table of a named set, with the records of a role: by its name, else by its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from jaxret.data.compression import SUFFIXES
from jaxret.data.errors import DataError, Location
from jaxret.data.formats.detect import detect_file
from jaxret.data.libraries.named import NamedSet, is_named
from jaxret.data.libraries.open_sets import is_whole_set, open_named_set
from jaxret.data.lines import find_file, missing_file_error, require_file

_TABLES = {  # role -> names of tables
    "passages": ("passages", "corpus", "documents", "collection", "docs"),
    "queries": ("queries", "topics"),
    "judgements": ("judgements", "qrels"),
    "examples": ("examples", "docpairs"),
    "rankings": ("rankings", "scoreddocs", "top_ranked"),
}
# Splits that contain all rows of a table, if it has several splits. The first one that exists is taken.
_WHOLE_SPLITS = ("full", "corpus", "queries", "train")


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder of files, or a named set of tables, with different contents."""
    return is_whole_set(path) if is_named(path) else path.is_dir()


def text_folder(path: Path) -> Path:
    """Return the folder or named set that has the texts for the ids in a file or table."""
    return open_named_set(path).root if is_named(path) else path.absolute().parent


def passages_path(folder: Path) -> Path:
    """Return the file or table of the passages. Raises DataError if it does not exist."""
    if is_named(folder):
        return _require_table(folder, "passages", None)
    return _folder_corpus(folder) or require_file(folder, _PASSAGES[0])


def has_passages(folder: Path) -> bool:
    """Return whether a folder or named set has a corpus."""
    return (
        _find_table(open_named_set(folder), "passages", None) if is_named(folder) else _folder_corpus(folder)
    ) is not None


def query_paths(folder: Path, split: str | None = None) -> list[Path]:
    """Return the files or tables of a split's queries, or of all queries without a split. Raises DataError if there are
    none."""
    if not is_named(folder):
        return _folder_queries(folder, split)
    named_set = open_named_set(folder)
    if split is None and not named_set.split:
        for config in _candidates(named_set, "queries"):
            return [named_set.table_path(config, name) for name in named_set.tables[config]]
    return [_require_table(folder, "queries", split)]


def judgements_path(folder: Path, split: str | None) -> Path:
    """Return the file of a split's judgements, or the file of its training records, whose positives are judgements.
    Raises DataError if neither exists, or if no split was named."""
    if not is_named(folder):
        return _folder_judgements(folder, split)
    return _find_table(open_named_set(folder), "judgements", split) or _require_table(folder, "examples", split)


def has_judgements(folder: Path, split: str) -> bool:
    if is_named(folder):
        return _find_table(open_named_set(folder), "judgements", split) is not None
    return _folder_judgement_file(folder, split) is not None


def examples_path(folder: Path, split: str | None) -> Path | None:
    """Return the file or table of a split's training records, or None."""
    return (
        _find_table(open_named_set(folder), "examples", split) if is_named(folder) else _folder_examples(folder, split)
    )


def rankings_path(folder: Path) -> Path:
    """Return the table of rankings of a named set. Raises DataError if it has none."""
    return _require_table(folder, "rankings", None)


def list_splits(folder: Path) -> list[str]:
    """Return the splits of judgements or training records."""
    if not is_named(folder):
        return _folder_splits(folder)
    named_set = open_named_set(folder)
    roles = [config for role in ("judgements", "examples") for config in _candidates(named_set, role)]
    splits = dict.fromkeys(split for config in roles for split in named_set.tables[config])
    return [split for split in splits if named_set.split in ("", split)]


def role_files(folder: Path, splits: Iterable[str | None] = ()) -> Iterator[Path]:
    """Yield the files of a folder or named set for all roles and splits, as far as a library names them. `splits` are
    further splits, because training files may have any name."""
    if is_named(folder):
        named_set = open_named_set(folder)
        for config, names in named_set.tables.items():
            for name in names:
                with suppress(DataError):  # a table that is not on this machine
                    yield from named_set.open(config, name).files
        return
    files = [_folder_corpus(folder), _first(folder, _QUERIES), *_queries_of_splits(folder), *_relations(folder, None)]
    files += [find_file(folder, "answers.jsonl")]
    for split in dict.fromkeys((*_folder_splits(folder), *splits)):
        files += [_folder_judgement_file(folder, split), _folder_examples(folder, split)] if split else []
    yield from (file for file in files if file)


def _require_table(folder: Path, role: str, split: str | None) -> Path:
    named_set = open_named_set(folder)
    path = _find_table(named_set, role, split)
    if path is None:
        suffix = f" of {split}" if split else ""
        remedy = f"its tables are: {named_set.describe_tables()}. Name a table as {named_set.root}/TABLE/SPLIT"
        raise Location(folder).error("missing table", f"{named_set.title} has no {role}{suffix}", remedy)
    return path


def _find_table(named_set: NamedSet, role: str, split: str | None) -> Path | None:
    """Return the table of a split, or None. A split in the set's path wins. Passages, queries and rankings may
    be in a table for all splits."""
    split = named_set.split or split
    for config in _candidates(named_set, role):
        splits = named_set.tables[config]
        if split in splits:
            return named_set.table_path(config, split or "")
        if role in ("passages", "queries", "rankings"):
            for whole_split in splits if len(splits) == 1 else (name for name in _WHOLE_SPLITS if name in splits):
                return named_set.table_path(config, whole_split)
    return None


def _candidates(named_set: NamedSet, role: str) -> Iterator[str]:
    """Yield the tables that may have records of a role: first the tables with a name of the role, then the tables with
    other names whose rows have its format."""
    tables = [named_set.config] if named_set.config else list(named_set.tables)
    yield from (name for name in _TABLES[role] if name in tables)
    role_names = {name for names in _TABLES.values() for name in names}
    for config in tables:
        if (
            config not in role_names
            and named_set.tables[config]
            and _gives(named_set.table_path(config, named_set.tables[config][0]), role)
        ):
            yield config


def _gives(path: Path, role: str) -> bool:
    try:
        file = detect_file(path)
    except DataError as error:
        if error.reason in ("unknown format", "wrong format"):
            return False
        raise
    if role == "examples":
        return file.format.examples is not None or file.format.id_examples is not None
    return file.format.gives(role)


# Folders of files

_PASSAGES = (
    "corpus.jsonl",  # BEIR, Tevatron, the Hugging Face hub
    "collection.splitTitle.tsv",  # MS MARCO with titles
    "collection.tsv",  # MS MARCO
    "psgs.tsv",  # DPR
    "psgs_w100.tsv",
    "documents.jsonl",  # PyLate
    "corpus.parquet",
    "corpus.tsv",
)
_QUERIES = ("queries.jsonl", "queries.tsv", "queries.parquet", "topics.jsonl", "topics.tsv")
_QUERIES_OF = ("queries.{}.tsv", "{}.qa.csv", "queries-{}.jsonl", "topics.{}.tsv")
_JUDGEMENTS_OF = ("qrels/{}.tsv", "qrels/{}.jsonl", "qrels/{}.txt", "qrels.{}.tsv", "qrels.{}.txt", "qrels-{}.tsv")
_EXAMPLES_OF = (
    "qidpidtriples.{}.tsv",
    "qidpidtriples.{}.full.tsv",
    "qidpidtriples.{}.full.2.tsv",
    "triples.{}.small.tsv",
    "triples.{}.tsv",
    "{}.jsonl",
    "{}.json",
    "{}.parquet",
)


def _folder_corpus(folder: Path) -> Path | None:
    """Return the file of passages, or None."""
    return _first(folder, _PASSAGES)


def _folder_queries(folder: Path, split: str | None = None) -> list[Path]:
    """Return the file of the split's queries, else the file of all queries, else the files of relations or splits.
    Raises DataError if no file exists."""
    query_file = _first(folder, [name.format(split) for name in _QUERIES_OF]) if split else None
    query_file = query_file or _first(folder, _QUERIES)
    if query_file:
        return [query_file]
    if several := _relations(folder, split) or _queries_of_splits(folder):
        return several
    raise missing_file_error(folder / _QUERIES[0], " (nor its .gz or .zst)")


def _relations(folder: Path, split: str | None) -> list[Path]:
    """Return the files of EntityQuestions, one for each relation, for one split or for all splits."""
    return sorted(folder.glob(f"P[0-9]*.{split or '*'}.json"))


def _queries_of_splits(folder: Path) -> list[Path]:
    return sorted({path for name in _QUERIES_OF for end in SUFFIXES for path in folder.glob(name.format("*") + end)})


def _folder_judgements(folder: Path, split: str | None) -> Path:
    """Return the file of a split's judgements, or its training file, whose positives are judgements. Raises DataError
    if neither exists, or if no split was named."""
    if split is None:
        raise Location(folder).error(
            "no split", "this is a folder, and no split was named", "name a split, like 'test'"
        )
    path = _folder_judgement_file(folder, split) or _folder_examples(folder, split)
    return path or require_file(folder / "qrels", f"{split}.tsv")


def _folder_judgement_file(folder: Path, split: str) -> Path | None:
    return _first(folder, [name.format(split) for name in _JUDGEMENTS_OF])


def _folder_examples(folder: Path, split: str | None) -> Path | None:
    """Return the training file of a split, or None."""
    return _first(folder, [name.format(split) for name in _EXAMPLES_OF]) if split else None


def _folder_splits(folder: Path) -> list[str]:
    """Return the splits in the names of files of judgements and of training records."""
    all_splits = {split for split in _USUAL_SPLITS if _folder_examples(folder, split)}
    for pattern in (*_JUDGEMENTS_OF, *_EXAMPLES_OF[:5]):
        start, end = pattern.split("{}")
        for suffix in SUFFIXES:
            names = (path.relative_to(folder).as_posix() for path in folder.glob(pattern.format("*") + suffix))
            splits = {name.removesuffix(suffix)[len(start) : -len(end)] for name in names}
            all_splits |= {split for split in splits if pattern in _JUDGEMENTS_OF or "." not in split}
    return sorted(all_splits, key=lambda split: ([*_USUAL_SPLITS, split].index(split), split))


_USUAL_SPLITS = ("train", "dev", "validation", "test")


def _first(folder: Path, names: tuple[str, ...] | list[str]) -> Path | None:
    return next((path for name in names if (path := find_file(folder, name))), None)
