"""One format -> another: records are read and written, and what the other cannot hold is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxret.data.files import PathLike, Policy
from jaxret.data.formats.beir import write_beir
from jaxret.data.formats.corpora import read_corpus
from jaxret.data.formats.folders import examples_in, splits_in
from jaxret.data.formats.format import ROLES
from jaxret.data.formats.readers import describe, read_examples, read_judgements, read_queries, read_run
from jaxret.data.formats.recognise import recognise, source_path
from jaxret.data.formats.writers import WRITERS, Lost
from jaxret.data.records import Example, Judgement, Passage, Query


@dataclass
class Converted:
    """What was written: what the source is, number of records by name of file, what is lost."""

    source: str
    written: dict[str, int] = field(default_factory=dict)
    lost: Lost = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} in {name}" for name, count in self.written.items())
        lost = "; ".join(f"{count:,} {what}" for what, count in self.lost.items() if count)
        return f"{self.source}: {counts or 'nothing'}{f'; not held: {lost}' if lost else ''}"


def convert(
    source: PathLike, to: PathLike, name: str, split: str = "train", role: str = "", policy: Policy | None = None
) -> Converted:
    """Writes what `source` holds to `to`, as the format (or folder) `name`. role: which of what it holds, if it is a
    file for one; split: of a folder, and what a folder made of a training file calls it. Raises ValueError for what
    cannot be written, DataError for bad records."""
    policy = policy or Policy()
    if name in FOLDERS:
        data = _whole(source, split, policy)
        return FOLDERS[name](Path(to), data)
    if name not in WRITERS:
        known = ", ".join((*FOLDERS, *WRITERS))
        raise ValueError(f"--to={name}: that is no format that can be written; it must be one of {known}")
    gives = _roles(source, split)
    for writer in WRITERS[name]:
        if writer.role in gives and role in ("", writer.role):
            items = _Counting(_read(source, writer.role, split, policy))
            lost = writer.write(Path(to), items.values)
            return Converted(describe_as(source, writer.role, split), {str(to): items.count}, lost)
    wanted = " or ".join(writer.role for writer in WRITERS[name] if role in ("", writer.role)) or role
    raise ValueError(f"{source} gives {', '.join(gives) or 'nothing'}, and {name} is written of {wanted}")


class _Counting:
    """Values that are counted while they are taken; a dict stays one."""

    def __init__(self, values: Any) -> None:
        self.count = len(values) if isinstance(values, dict) else 0
        self.values: Any = values if isinstance(values, dict) else self._counted(values)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.count += 1
            yield value


def describe_as(source: PathLike, role: str, split: str) -> str:
    """What is read of the source."""
    return str(recognise(source, role)) if source_path(source).is_file() else describe(source, role, split)


def _roles(source: PathLike, split: str) -> list[str]:
    """What a source gives."""
    path = source_path(source)
    if path.is_file() or not path.exists():
        return recognise(source).format.roles()
    return [role for role in ROLES[:4] if _has(source, role, split)]


def _has(source: PathLike, role: str, split: str) -> bool:
    try:
        describe(source, role, split)
    except ValueError:
        return False
    return True


def _read(source: PathLike, role: str, split: str, policy: Policy) -> Any:
    if role == "passages":
        return read_corpus(source, policy)
    if role == "queries":
        return read_queries(source, policy, split)
    if role == "judgements":
        return read_judgements(source, split, policy)
    if role == "rankings":
        return read_run(source, policy)
    return read_examples(source, split, policy, targets=False)


# Folders


@dataclass(frozen=True)
class DataSet:
    """A whole data set; by split: judgements, and examples where they were not made of these."""

    source: str
    passages: Iterable[Passage]
    queries: list[Query]
    judgements: dict[str, list[Judgement]]
    examples: Callable[[str], list[Example]]

    def judged(self, split: str) -> list[Query]:
        """The queries of a split."""
        ids = {judgement.query_id for judgement in self.judgements[split]}
        return [query for query in self.queries if query.id in ids]


def _whole(source: PathLike, split: str, policy: Policy) -> DataSet:
    path = source_path(source)
    if not path.is_dir():
        examples = read_examples(source, split, policy, targets=False)
        passages = {p.id: p for e in examples for p in (*e.positives, *e.negatives)}
        queries = {e.query.id: e.query for e in examples}
        said = describe_as(source, "examples", split)
        return DataSet(said, passages.values(), [*queries.values()], {split: _judged(examples)}, lambda _: examples)

    def examples_of(one: str) -> list[Example]:
        return read_examples(source, one, policy, targets=False)

    judgements = {
        one: _judged(examples_of(one)) if examples_in(path, one) else read_judgements(source, one, policy)
        for one in splits_in(path)
    }
    return DataSet(
        describe(source, "passages"), read_corpus(source, policy), read_queries(source, policy), judgements, examples_of
    )


def _judged(examples: Iterable[Example]) -> list[Judgement]:
    """Positives as relevant, negatives as judged not to be: as which they are read again."""
    return [
        Judgement(example.query.id, passage.id, grade)
        for example in examples
        for grade, side in ((1, example.positives), (0, example.negatives))
        for passage in side
    ]


@dataclass
class _Folder:
    """Writes files into a folder one after the other, and keeps account."""

    folder: Path
    done: Converted

    def write(self, file: str, name: str, role: str, values: Iterable[Any]) -> None:
        items = _Counting(values)
        self.done.lost += next(w.write for w in WRITERS[name] if w.role == role)(self.folder / file, items.values)
        self.done.written[file] = items.count


def _beir(folder: Path, data: DataSet) -> Converted:
    passages = _Counting(data.passages)
    write_beir(folder, passages.values, data.queries, data.judgements)
    counts = {f"qrels/{split}.tsv": len(found) for split, found in data.judgements.items()}
    done = Converted(data.source, {"corpus.jsonl": passages.count, "queries.jsonl": len(data.queries), **counts})
    scored = [e for split in data.judgements for e in data.examples(split) if e.positive_scores]
    done.lost["scores"] = sum(len(e.positive_scores) + len(e.negative_scores) for e in scored)
    return done


def _msmarco(folder: Path, data: DataSet) -> Converted:
    to = _Folder(folder, Converted(data.source))
    to.write("collection.tsv", "msmarco.texts", "passages", data.passages)
    for split, judgements in data.judgements.items():
        to.write(f"queries.{split}.tsv", "msmarco.texts", "queries", data.judged(split))
        to.write(f"qrels.{split}.tsv", "trec.qrels", "judgements", judgements)
    return to.done


def _tevatron(folder: Path, data: DataSet) -> Converted:
    to = _Folder(folder, Converted(data.source))
    to.write("corpus.jsonl", "tevatron.corpus", "passages", data.passages)
    to.write("queries.jsonl", "tevatron.queries", "queries", data.queries)
    for split in data.judgements:
        to.write(f"{split}.jsonl", "tevatron.named", "examples", data.examples(split))
    return to.done


def _dpr(folder: Path, data: DataSet) -> Converted:
    to = _Folder(folder, Converted(data.source))
    to.write("psgs.tsv", "dpr.passages", "passages", data.passages)
    for split in data.judgements:
        to.write(f"{split}.qa.csv", "dpr.queries", "queries", data.judged(split))
        to.write(f"{split}.json", "dpr.examples", "examples", data.examples(split))
    return to.done


FOLDERS: dict[str, Callable[[Path, DataSet], Converted]] = {
    "beir": _beir,
    "msmarco": _msmarco,
    "tevatron": _tevatron,
    "dpr": _dpr,
}
