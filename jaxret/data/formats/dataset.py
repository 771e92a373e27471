"""A data set as a whole: all splits of a folder, a named set or a training file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxret.data.errors import Policy
from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.detect import role_by_name
from jaxret.data.formats.sources import JudgementSource, QuerySource, TrainingSource, joined_examples
from jaxret.data.records import Example, Judgement, Passage, Query


@dataclass(frozen=True)
class FullDataSet:
    """All splits of a folder, a named set or a training file."""

    source: str  # Format in words
    splits: tuple[str, ...]  # Of judgements or training records
    splits_with_examples: frozenset[str]  # The splits with training records
    passages: Callable[[], Iterable[Passage]]  # Reads the corpus
    queries: Callable[[str | None], list[Query]]  # Reads the queries of a split; None: of all splits
    # Reads the judgements of a split. If there are none, positives of its training records are relevant, and negatives
    # are not
    judgements: Callable[[str], list[Judgement]]
    examples: Callable[[str], list[Example]]  # Reads the training records of a split, or makes them from its judgements
    queries_by_split: bool = False  # Whether each split has a file of queries
    every_positive: bool = True  # See `Format`


def open_data_set(source: DataSource, split: str, policy: Policy) -> FullDataSet:
    """Open all parts of a source. A part is read when it is requested, under `policy`. `split` names the split of a
    training file."""
    if source.is_folder:
        return _of_folder(source, policy)
    data = TrainingSource.find(source, split)
    return _of_records(data, split, policy) if data else _of_corpus(source, policy)


def _of_records(data: TrainingSource, split: str, policy: Policy) -> FullDataSet:
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


def _of_corpus(source: DataSource, policy: Policy) -> FullDataSet:
    """Open a file of passages, perhaps with queries. Raises ValueError for a file without passages."""
    file = source.file()
    roles = [role_by_name(file.path)] if file.format.titles else file.format.roles()
    if "passages" not in roles:
        raise ValueError(f"{source} is {file}, which gives {', '.join(roles)}; a whole data set has passages")
    with_queries = file.format.queries is not None and not file.format.titles
    corpus = Corpus.of(source)
    return FullDataSet(
        source=corpus.describe(),
        splits=(),
        splits_with_examples=frozenset(),
        passages=lambda: corpus.read(policy),
        queries=lambda split: QuerySource.of(source, split).read(policy) if with_queries else [],
        judgements=lambda _: [],
        examples=lambda _: [],
    )


def _of_folder(source: DataSource, policy: Policy) -> FullDataSet:
    layout, corpus = source.layout, Corpus.of(source)
    splits = layout.list_splits()
    training_splits = frozenset(split for split in splits if layout.find_examples(split))

    def examples(split: str) -> list[Example]:
        data = TrainingSource.of(source, split)
        if data.file and (queries := QuerySource.of(source, split)).without_ids:
            records = joined_examples(data.file, queries, queries.read(policy), policy)
            if records is not None:
                return [example for _, example in records]
        return data.read(policy, targets=False)

    def judgements(split: str) -> list[Judgement]:
        if layout.find_judgements(split):
            return JudgementSource.of(source, split).read(policy)
        return judgements_of_examples(examples(split))

    return FullDataSet(
        source=corpus.describe(),
        splits=tuple(splits),
        splits_with_examples=training_splits,
        passages=lambda: corpus.read(policy),
        queries=lambda split: QuerySource.of(source, split).read(policy),
        judgements=judgements,
        examples=examples,
        queries_by_split=len(layout.list_queries()) > 1,
        every_positive=not any(TrainingSource.of(source, split).first_target_only for split in training_splits),
    )


def judgements_of_examples(examples: Iterable[Example]) -> list[Judgement]:
    """Return judgements that make the positives of training records relevant, and the negatives not relevant."""
    judgements: dict[tuple[str, str], Judgement] = {}
    for example in examples:
        for grade, side in ((1, example.positives), (0, example.negatives)):
            for passage in side:
                key = example.query.id, passage.id
                if key not in judgements or grade:
                    judgements[key] = Judgement(*key, grade)
    return list(judgements.values())
