"""Read the training queries to mine for, with their positives, in any format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxret.data.errors import Location, Policy
from jaxret.data.formats import QuerySource, TrainingSource, source_path
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.shared_passages import SharedPassages
from jaxret.data.formats.sources import examples_by_target
from jaxret.data.formats.tevatron import parse_tevatron_example
from jaxret.data.records import Example, Passage, Query, Record
from jaxret.storage.atomic import sha256_json_lists

_WITH_TEXTS = ("tevatron.examples", "tevatron.first")  # formats of the files that `mine` writes


@dataclass(frozen=True)
class TrainingQuery:
    """A training query with its positives. The first is the target, unless every positive is one."""

    query: Query
    positives: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class TrainingQueries:
    """The training queries of a source, with distinct ids."""

    queries: tuple[TrainingQuery, ...]
    every_positive: bool  # every positive is a target, as in `Format`

    def digest(self) -> str:
        """Return the SHA-256 of all queries with the ids of their positives, in order."""
        return sha256_json_lists(
            [*entry.query.to_json(), [passage.id for passage in entry.positives]] for entry in self.queries
        )


def open_training_queries(source: str, split: str, positives: bool = True) -> TrainingSource | QuerySource:
    """Open the training queries of a folder's split or of a file.

    Args:
        source: folder or file.
        split: split of a folder.
        positives: require positives. False also opens queries without one, e.g. a file of questions.

    Raises:
        DataError: a file is missing, or has no training queries.
    """
    if positives:
        return TrainingSource.open(source, split)
    data = DataSource.open(source)
    return TrainingSource.find(data, split) or QuerySource.of(data, split)


def open_concatenated(source: str) -> TrainingSource:
    """Open a training file whose records follow the mined ones. Raises ValueError if it is not a file."""
    if not source_path(source).is_file():
        raise ValueError(f"--concat={source} is not a file; give a file of training records")
    return TrainingSource.open(source)


def read_training_queries(data: TrainingSource | QuerySource, policy: Policy) -> TrainingQueries:
    """Return the training queries of opened data.

    Raises:
        DataError: a bad record.
        ValueError: there is no query.
    """
    if isinstance(data, TrainingSource):
        by_id: dict[str, TrainingQuery] = {}
        passages: dict[Passage, Passage] = {}  # one object for each passage, even if many queries have it
        for example in read_query_examples(data, policy):
            earlier = by_id.get(example.query.id, TrainingQuery(example.query))
            require_same_text(earlier.query, example.query, data.source)
            unique_passages = dict.fromkeys((*earlier.positives, *example.positives))
            positives = tuple(passages.setdefault(passage, passage) for passage in unique_passages)
            by_id[example.query.id] = TrainingQuery(earlier.query, positives)
        queries, every_target = tuple(by_id.values()), not data.first_target_only
    else:
        queries, every_target = tuple(map(TrainingQuery, data.read(policy))), False
    if not queries:
        raise ValueError(f"{data} has no training query; give a folder or file with training queries")
    return TrainingQueries(queries, every_target)


def require_same_text(first: Query, second: Query, source: str) -> None:
    """Raise ValueError for two questions with one id, because code that looks up queries by id would confuse them."""
    if first.text != second.text:
        raise ValueError(
            f"{source}: query {first.id!r} is {first.text[:60]!r} and {second.text[:60]!r}; give them different ids"
        )


def read_query_examples(data: TrainingSource, policy: Policy) -> Iterable[Example]:
    """Return the examples, one for each query or record. Those of a mined file, which have many negatives, are read one
    at a time."""
    if data.file and data.file.format.name in _WITH_TEXTS:
        return _stream(data.file, policy)
    return data.read(policy, targets=False)


def stream_mined_examples(path: Path, policy: Policy) -> Iterator[Example]:
    """Yield the examples of a file that `jaxret mine` wrote; no passage stays in memory."""
    return _stream(DataSource.open(path).file("examples"), policy)


def _stream(file: DataFile, policy: Policy) -> Iterator[Example]:
    def parse(record: Record, location: Location) -> Example:
        return parse_tevatron_example(record, location, SharedPassages(policy))

    return (example for _, example in policy.parse_records(read_records(file, policy), parse))


def read_concatenated(data: TrainingSource, keep: int, policy: Policy) -> Iterator[Example]:
    """Yield the examples of a training file with their first `keep` negatives."""
    for example in read_query_examples(data, policy):
        yield replace(example, negatives=example.negatives[:keep], negative_scores=example.negative_scores[:keep])


def split_by_target(examples: Iterable[Example], every_positive: bool, file_every_positive: bool) -> Iterator[Example]:
    """Yield examples for a file whose positives are all targets (file_every_positive), or only the first.

    Examples whose positives are all targets (every_positive) are split into one for each positive if the file has one
    target per example.
    """
    for example in examples:
        yield from examples_by_target(example) if every_positive and not file_every_positive else [example]
