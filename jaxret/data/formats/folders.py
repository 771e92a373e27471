"""Which file of a folder holds what: by its name, as data sets are published. What it is its content says."""

from __future__ import annotations

from pathlib import Path

from jaxret.data.compression import SUFFIXES
from jaxret.data.files import Where, find_file, missing_file, require_file

_PASSAGES = (
    "corpus.jsonl",  # BEIR, Tevatron, the Hugging Face hub
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


def passages_in(folder: Path) -> Path:
    """Raises DataError if there is none."""
    return corpus_in(folder) or require_file(folder, _PASSAGES[0])


def corpus_in(folder: Path) -> Path | None:
    """The file of passages, if there is one."""
    return _first(folder, _PASSAGES)


def queries_in(folder: Path, split: str | None = None) -> list[Path]:
    """The file of all queries, or that of the split; without a split, those of all of them. Raises DataError if there
    is none."""
    found = _first(folder, [name.format(split) for name in _QUERIES_OF]) if split else None
    found = found or _first(folder, _QUERIES)
    if found:
        return [found]
    several = sorted({path for name in _QUERIES_OF for end in SUFFIXES for path in folder.glob(name.format("*") + end)})
    if not several:
        raise missing_file(folder / _QUERIES[0], " (nor its .gz or .zst)")
    return several


def judgements_in(folder: Path, split: str | None) -> Path:
    """The judgements of a split; else its training file, whose positives they are. Raises DataError if there is
    neither, or no split was named."""
    if split is None:
        raise Where(folder).error("no split", "this is a folder, and no split was named", "name one, like 'test'")
    found = own_judgements_in(folder, split) or examples_in(folder, split)
    return found or require_file(folder / "qrels", f"{split}.tsv")


def own_judgements_in(folder: Path, split: str) -> Path | None:
    """The file of judgements of a split, if there is one."""
    return _first(folder, [name.format(split) for name in _JUDGEMENTS_OF])


def examples_in(folder: Path, split: str | None) -> Path | None:
    """The training file of a split, if there is one."""
    return _first(folder, [name.format(split) for name in _EXAMPLES_OF]) if split else None


def splits_in(folder: Path) -> list[str]:
    """The splits that files of judgements or training are named after."""
    found = {split for split in _USUAL_SPLITS if examples_in(folder, split)}
    for pattern in (*_JUDGEMENTS_OF, *_EXAMPLES_OF[:5]):
        start, end = pattern.split("{}")
        for suffix in SUFFIXES:
            names = (path.relative_to(folder).as_posix() for path in folder.glob(pattern.format("*") + suffix))
            splits = {name.removesuffix(suffix)[len(start) : -len(end)] for name in names}
            found |= {split for split in splits if pattern in _JUDGEMENTS_OF or "." not in split}
    return sorted(found, key=lambda split: ([*_USUAL_SPLITS, split].index(split), split))


_USUAL_SPLITS = ("train", "dev", "validation", "test")


def _first(folder: Path, names: tuple[str, ...] | list[str]) -> Path | None:
    return next((path for name in names if (path := find_file(folder, name))), None)
