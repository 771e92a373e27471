"""A whole data set: of a folder, a named set or a training file, what all of its splits hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxret.data.files import PathLike, Policy
from jaxret.data.formats.corpora import read_corpus
from jaxret.data.formats.places import examples_in, has_judgements, is_folder, queries_in, splits_in
from jaxret.data.formats.readers import describe, keeps_first, read_examples, read_judgements, read_queries
from jaxret.data.formats.recognise import Found, by_name, recognise, source_path
from jaxret.data.records import Example, Judgement, Passage, Query


@dataclass(frozen=True)
class DataSet:
    """judgements: of each split; where it has none of its own, of its training records: positives are relevant,
    negatives are not. trained: the splits with training records. examples: of a split, from its training records, or
    made of its judgements. queries: those of a split, or with None those of all."""

    source: str
    splits: tuple[str, ...]
    trained: frozenset[str]
    passages: Callable[[], Iterable[Passage]]
    queries: Callable[[str | None], list[Query]]
    judgements: Callable[[str], list[Judgement]]
    examples: Callable[[str], list[Example]]
    queries_by_split: bool = False
    every_positive: bool = True  # see Format


def read_whole(source: PathLike, split: str, policy: Policy) -> DataSet:
    """What a source holds; split: what a file's is called. Read where it is asked for, by a policy for bad records."""
    path = source_path(source)
    return _of_folder(source, path, policy) if is_folder(path) else _of_file(source, split, policy)


def _of_file(source: PathLike, split: str, policy: Policy) -> DataSet:
    found = recognise(source)
    if not found.format.gives("examples"):
        return _of_corpus(source, found, policy)
    examples = read_examples(source, split, policy, targets=False)
    passages = {p.id: p for e in examples for p in (*e.positives, *e.negatives)}
    queries = {e.query.id: e.query for e in examples}
    return DataSet(
        source=describe(source, "examples", split),
        splits=(split,),
        trained=frozenset([split]),
        passages=passages.values,
        queries=lambda _: [*queries.values()],
        judgements=lambda _: judged_of(examples),
        examples=lambda _: examples,
        every_positive=not keeps_first(source, split),
    )


def _of_corpus(source: PathLike, found: Found, policy: Policy) -> DataSet:
    """A file of passages, perhaps with queries. Raises ValueError for one of other things."""
    given = [by_name(found.path)] if found.format.titles else found.format.roles()
    if "passages" not in given:
        raise ValueError(f"{source} is {found}, which gives {', '.join(given)}; a whole data set has passages")
    with_queries = found.format.queries is not None and not found.format.titles
    return DataSet(
        source=describe(source, "passages"),
        splits=(),
        trained=frozenset(),
        passages=lambda: read_corpus(source, policy),
        queries=lambda split: read_queries(source, policy, split) if with_queries else [],
        judgements=lambda _: [],
        examples=lambda _: [],
    )


def _of_folder(source: PathLike, path: Path, policy: Policy) -> DataSet:
    splits = splits_in(path)
    trained = frozenset(split for split in splits if examples_in(path, split))

    def examples(split: str) -> list[Example]:
        return read_examples(source, split, policy, targets=False)

    def judgements(split: str) -> list[Judgement]:
        if has_judgements(path, split):
            return read_judgements(source, split, policy)
        return judged_of(examples(split))

    return DataSet(
        source=describe(source, "passages"),
        splits=tuple(splits),
        trained=trained,
        passages=lambda: read_corpus(source, policy),
        queries=lambda split: read_queries(source, policy, split),
        judgements=judgements,
        examples=examples,
        queries_by_split=len(queries_in(path)) > 1,
        every_positive=not any(keeps_first(source, split) for split in trained),
    )


def judged_of(examples: Iterable[Example]) -> list[Judgement]:
    """Positives as relevant, negatives as judged not to be: as which they are read again."""
    found: dict[tuple[str, str], Judgement] = {}
    for example in examples:
        for grade, side in ((1, example.positives), (0, example.negatives)):
            for passage in side:
                key = example.query.id, passage.id
                if key not in found or grade:
                    found[key] = Judgement(*key, grade)
    return list(found.values())
