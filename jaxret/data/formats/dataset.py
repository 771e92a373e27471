"""A data set as a whole: all splits of a folder, a named set or a training file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxret.data.errors import Policy
from jaxret.data.formats.corpus import read_corpus
from jaxret.data.formats.detect import detect_file, role_by_name, source_path
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.readers import describe_source, read_judgements, read_queries
from jaxret.data.formats.source_layout import examples_path, has_judgements, is_folder, list_splits, query_paths
from jaxret.data.formats.sources import QuerySource, TrainingSource, joined_examples
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Passage, Query


@dataclass(frozen=True)
class FullDataSet:
    """All splits of a folder, a named set or a training file."""

    source: str  # Its format, in words
    splits: tuple[str, ...]  # Of judgements or training records
    splits_with_examples: frozenset[str]  # The splits with training records
    passages: Callable[[], Iterable[Passage]]  # Reads the corpus
    queries: Callable[[str | None], list[Query]]  # Reads the queries of a split; None: of all splits
    # Reads those of a split; if it has none, positives of its training records are relevant, negatives not
    judgements: Callable[[str], list[Judgement]]
    examples: Callable[[str], list[Example]]  # Reads the training records of a split, or makes them of its judgements
    queries_by_split: bool = False  # Whether each split has a file of queries
    every_positive: bool = True  # See `Format`


def open_data_set(source: PathLike, split: str, policy: Policy) -> FullDataSet:
    """Open all parts of a source. A part is read when it is requested, under `policy`. `split` names the split of a
    training file."""
    path = source_path(source)
    return _of_folder(source, path, policy) if is_folder(path) else _of_file(source, split, policy)


def _of_file(source: PathLike, split: str, policy: Policy) -> FullDataSet:
    file = detect_file(source)
    if not file.format.gives("examples"):
        return _of_corpus(source, file, policy)
    data = TrainingSource.open(source, split)
    examples = data.read(policy, targets=False)
    passages = {passage.id: passage for example in examples for passage in (*example.positives, *example.negatives)}
    queries = {example.query.id: example.query for example in examples}
    return FullDataSet(
        source=data.describe(),
        splits=(split,),
        splits_with_examples=frozenset([split]),
        passages=passages.values,
        queries=lambda _: [*queries.values()],
        judgements=lambda _: judgements_of_examples(examples),
        examples=lambda _: examples,
        every_positive=not data.first_target_only,
    )


def _of_corpus(source: PathLike, file: DataFile, policy: Policy) -> FullDataSet:
    """Open a file of passages, perhaps with queries. Raises ValueError for one of other things."""
    roles = [role_by_name(file.path)] if file.format.titles else file.format.roles()
    if "passages" not in roles:
        raise ValueError(f"{source} is {file}, which gives {', '.join(roles)}; a whole data set has passages")
    with_queries = file.format.queries is not None and not file.format.titles
    return FullDataSet(
        source=describe_source(source, "passages"),
        splits=(),
        splits_with_examples=frozenset(),
        passages=lambda: read_corpus(source, policy),
        queries=lambda split: read_queries(source, policy, split) if with_queries else [],
        judgements=lambda _: [],
        examples=lambda _: [],
    )


def _of_folder(source: PathLike, path: Path, policy: Policy) -> FullDataSet:
    splits = list_splits(path)
    training_splits = frozenset(split for split in splits if examples_path(path, split))

    def examples(split: str) -> list[Example]:
        data = TrainingSource.open(source, split)
        if data.file and (queries := QuerySource.open(source, split)).without_ids:
            records = joined_examples(data.file, queries, queries.read(policy), policy)
            if records is not None:
                return [example for _, example in records]
        return data.read(policy, targets=False)

    def judgements(split: str) -> list[Judgement]:
        if has_judgements(path, split):
            return read_judgements(source, split, policy)
        return judgements_of_examples(examples(split))

    return FullDataSet(
        source=describe_source(source, "passages"),
        splits=tuple(splits),
        splits_with_examples=training_splits,
        passages=lambda: read_corpus(source, policy),
        queries=lambda split: read_queries(source, policy, split),
        judgements=judgements,
        examples=examples,
        queries_by_split=len(query_paths(path)) > 1,
        every_positive=not any(TrainingSource.open(source, split).first_target_only for split in training_splits),
    )


def judgements_of_examples(examples: Iterable[Example]) -> list[Judgement]:
    """Return positives as relevant and negatives as not relevant, as a reader of judgements sees training records."""
    judgements: dict[tuple[str, str], Judgement] = {}
    for example in examples:
        for grade, side in ((1, example.positives), (0, example.negatives)):
            for passage in side:
                key = example.query.id, passage.id
                if key not in judgements or grade:
                    judgements[key] = Judgement(*key, grade)
    return list(judgements.values())
