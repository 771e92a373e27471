"""Find the file of a folder, or the table of a named set, with the records of a role: by its name, else by its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from jaxret.data.compression import SUFFIXES
from jaxret.data.errors import DataError, Location
from jaxret.data.libraries.named import NamedSet, is_named
from jaxret.data.libraries.open_sets import open_named_set, open_table
from jaxret.data.lines import NO_VARIANT, find_file, missing_file_error, require_file

_TABLES = {  # role -> names of tables
    "passages": ("passages", "corpus", "documents", "collection", "docs"),
    "queries": ("queries", "topics"),
    "judgements": ("judgements", "qrels"),
    "examples": ("examples", "docpairs"),
    "rankings": ("rankings", "scoreddocs", "top_ranked"),
}
# Splits that contain all rows of a table, if it has several splits. The first one that exists is taken.
_WHOLE_SPLITS = ("full", "corpus", "queries", "train")


def open_layout(path: Path, gives: Callable[[Path, str], bool]) -> Layout:
    """Return the layout of a file, folder, named set or one of its tables. `gives` says whether a table has records of
    a role."""
    if not is_named(path):
        return FolderLayout(path) if path.is_dir() else Layout(path)
    named_set = open_named_set(path)
    return Layout(path) if named_set.config and named_set.split else SetLayout(path, named_set, gives)


def text_folder(path: Path) -> Path:
    """Return the folder or named set that has the texts for the ids in a file or table."""
    return open_named_set(path).root if is_named(path) else path.absolute().parent


class Layout:
    """The file or table with the records of each role. This class is for a single file or table, which is read for
    every role.

    Methods that find a file return None if there is none; those that require it, and `list_queries`, raise DataError.
    """

    is_folder = False  # Whether there are several files or tables with different contents

    def __init__(self, path: Path) -> None:
        self.path = path

    def find_passages(self) -> Path | None:
        return self.path

    def require_passages(self) -> Path:
        return self.path

    def list_queries(self, split: str | None = None) -> list[Path]:
        """Return the files or tables of a split's queries, or of all queries without a split."""
        return [self.path]

    def find_judgements(self, split: str) -> Path | None:
        """Return the file or table of a split's judgements. Training records do not count."""
        return self.path

    def require_judgements(self, split: str | None) -> Path:
        """Return the file of a split's judgements, or the file of its training records, whose positives are judgements.
        Without a split there are none in a folder."""
        return self.path

    def find_examples(self, split: str | None) -> Path | None:
        """Return the file or table of a split's training records."""
        return self.path

    def require_rankings(self) -> Path:
        return self.path

    def list_splits(self) -> list[str]:
        """Return the splits of judgements or training records."""
        return []

    def files(self, splits: Iterable[str | None] = ()) -> Iterator[Path]:
        """Yield the files for all roles and splits, as far as a library names them. `splits` are further splits,
        because training files may have any name."""
        if is_named(self.path):
            yield from open_table(self.path).files
            return
        yield self.path
        if self.path.name.startswith("queries.jsonl") and (answers := find_file(self.path.parent, "answers.jsonl")):
            yield answers


class SetLayout(Layout):
    """The tables of a named set. A split in the set's path has precedence."""

    is_folder = True

    def __init__(self, path: Path, named_set: NamedSet, gives: Callable[[Path, str], bool]) -> None:
        super().__init__(path)
        self._set, self._gives = named_set, gives

    def find_passages(self) -> Path | None:
        return self._find("passages", None)

    def require_passages(self) -> Path:
        return self._require("passages", None)

    def list_queries(self, split: str | None = None) -> list[Path]:
        if split is None and not self._set.split:
            for config in self._candidates("queries"):
                return [self._set.table_path(config, name) for name in self._set.tables[config]]
        return [self._require("queries", split)]

    def find_judgements(self, split: str) -> Path | None:
        return self._find("judgements", split)

    def require_judgements(self, split: str | None) -> Path:
        return self._find("judgements", split) or self._require("examples", split)

    def find_examples(self, split: str | None) -> Path | None:
        return self._find("examples", split)

    def require_rankings(self) -> Path:
        return self._require("rankings", None)

    def list_splits(self) -> list[str]:
        configs = [config for role in ("judgements", "examples") for config in self._candidates(role)]
        splits = dict.fromkeys(split for config in configs for split in self._set.tables[config])
        return [split for split in splits if self._set.split in ("", split)]

    def files(self, splits: Iterable[str | None] = ()) -> Iterator[Path]:
        for config, names in self._set.tables.items():
            for name in names:
                with suppress(DataError):  # a table that is not on this machine
                    yield from self._set.open(config, name).files

    def _require(self, role: str, split: str | None) -> Path:
        path = self._find(role, split)
        if path is None:
            suffix = f" of {split}" if split else ""
            remedy = f"its tables are: {self._set.describe_tables()}. Name a table as {self._set.root}/TABLE/SPLIT"
            raise Location(self.path).error("missing table", f"{self._set.title} has no {role}{suffix}", remedy)
        return path

    def _find(self, role: str, split: str | None) -> Path | None:
        """Return the table of a split, or None. Passages, queries and rankings may be in a table for all splits."""
        split = self._set.split or split
        for config in self._candidates(role):
            splits = self._set.tables[config]
            if split in splits:
                return self._set.table_path(config, split or "")
            if role in ("passages", "queries", "rankings"):
                for whole_split in splits if len(splits) == 1 else (name for name in _WHOLE_SPLITS if name in splits):
                    return self._set.table_path(config, whole_split)
        return None

    def _candidates(self, role: str) -> Iterator[str]:
        """Yield the tables that may have records of a role: first the tables with a name of the role, then the tables
        with other names whose rows have its format."""
        tables = [self._set.config] if self._set.config else list(self._set.tables)
        yield from (name for name in _TABLES[role] if name in tables)
        role_names = {name for names in _TABLES.values() for name in names}
        for config in tables:
            splits = self._set.tables[config]
            if config not in role_names and splits and self._gives(self._set.table_path(config, splits[0]), role):
                yield config


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
_USUAL_SPLITS = ("train", "dev", "validation", "test")


class FolderLayout(Layout):
    """The files of a folder, by their names."""

    is_folder = True

    def find_passages(self) -> Path | None:
        return self._first(_PASSAGES)

    def require_passages(self) -> Path:
        return self.find_passages() or require_file(self.path, _PASSAGES[0])

    def list_queries(self, split: str | None = None) -> list[Path]:
        """Return the file of the split's queries, else the file of all queries, else those of relations or splits."""
        if query_file := self._first(_of(_QUERIES_OF, split)) or self._first(_QUERIES):
            return [query_file]
        if several := self._relations(split) or self._queries_of_splits():
            return several
        raise missing_file_error(self.path / _QUERIES[0], NO_VARIANT)

    def find_judgements(self, split: str) -> Path | None:
        return self._first(_of(_JUDGEMENTS_OF, split))

    def require_judgements(self, split: str | None) -> Path:
        if split is None:
            raise Location(self.path).error(
                "no split", "this is a folder, and no split was named", "name a split, like 'test'"
            )
        path = self.find_judgements(split) or self.find_examples(split)
        return path or require_file(self.path / "qrels", f"{split}.tsv")

    def find_examples(self, split: str | None) -> Path | None:
        return self._first(_of(_EXAMPLES_OF, split))

    def list_splits(self) -> list[str]:
        all_splits = {split for split in _USUAL_SPLITS if self.find_examples(split)}
        for pattern in (*_JUDGEMENTS_OF, *_EXAMPLES_OF[:5]):
            start, end = pattern.split("{}")
            for suffix in SUFFIXES:
                names = (
                    path.relative_to(self.path).as_posix() for path in self.path.glob(pattern.format("*") + suffix)
                )
                splits = {name.removesuffix(suffix)[len(start) : -len(end)] for name in names}
                all_splits |= {split for split in splits if pattern in _JUDGEMENTS_OF or "." not in split}
        return sorted(all_splits, key=lambda split: ([*_USUAL_SPLITS, split].index(split), split))

    def files(self, splits: Iterable[str | None] = ()) -> Iterator[Path]:
        files = [self.find_passages(), self._first(_QUERIES), *self._queries_of_splits(), *self._relations(None)]
        files += [find_file(self.path, "answers.jsonl")]
        for split in dict.fromkeys((*self.list_splits(), *splits)):
            files += [self.find_judgements(split), self.find_examples(split)] if split else []
        yield from (file for file in files if file)

    def _relations(self, split: str | None) -> list[Path]:
        """Return the files of EntityQuestions, one for each relation, for one split or for all splits."""
        return sorted(self.path.glob(f"P[0-9]*.{split or '*'}.json"))

    def _queries_of_splits(self) -> list[Path]:
        names = (name.format("*") + suffix for name in _QUERIES_OF for suffix in SUFFIXES)
        return sorted({path for name in names for path in self.path.glob(name)})

    def _first(self, names: Iterable[str]) -> Path | None:
        return next((path for name in names if (path := find_file(self.path, name))), None)


def _of(names: Iterable[str], split: str | None) -> list[str]:
    """Return the names of a split's files; none without a split."""
    return [name.format(split) for name in names] if split else []
