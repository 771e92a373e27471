"""Read the training queries to mine for, with their positives, in any format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    detect_file,
    detect_queries,
    example_files,
    is_named,
    list_files,
    read_examples,
    read_queries,
    source_path,
)
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.readers import examples_by_target, targets_first_only
from jaxret.data.formats.shared_passages import SharedPassages
from jaxret.data.formats.source_layout import examples_path, has_judgements, is_folder
from jaxret.data.formats.tevatron import parse_tevatron_example
from jaxret.data.records import Example, Passage, Query
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
        return sha256_json_lists(
            [*one.query.to_json(), [passage.id for passage in one.positives]] for one in self.queries
        )


def read_training_queries(source: str, split: str, policy: Policy, positives: bool = True) -> TrainingQueries:
    """Return the training queries of a folder's split or of a file.

    Args:
        source: folder or file.
        split: of a folder.
        positives: require positives. False also reads queries without one, e.g. a file of questions.
    Raises:
        DataError: a bad record.
        ValueError: there is no query.
    """
    if positives or _has_examples(source, split):
        by_id: dict[str, TrainingQuery] = {}
        passages: dict[Passage, Passage] = {}  # one object for a passage, however many queries have it
        for example in _examples(source, split, policy):
            before = by_id.get(example.query.id, TrainingQuery(example.query))
            require_same_text(before.query, example.query, source)
            both = dict.fromkeys((*before.positives, *example.positives))
            by_id[example.query.id] = TrainingQuery(before.query, tuple(passages.setdefault(one, one) for one in both))
        queries, every = tuple(by_id.values()), not targets_first_only(source, split)
    else:
        queries, every = tuple(map(TrainingQuery, read_queries(source, policy, split))), False
    if not queries:
        raise ValueError(f"{source} has no training query; give a folder or file with some")
    return TrainingQueries(queries, every)


def training_query_files(source: str, split: str, positives: bool = True) -> list[Path]:
    """Return the files that `read_training_queries` reads with these arguments."""
    if positives or _has_examples(source, split):
        path = source_path(source)
        return [path] if path.is_file() and not is_named(path) else example_files(source, split)
    return [file for detection in detect_queries(source, split) for file in list_files(detection.path)]


def require_same_text(one: Query, other: Query, source: str) -> None:
    """Raise ValueError for two questions with one id: code that looks queries up by id would confuse them."""
    if one.text != other.text:
        raise ValueError(
            f"{source}: query {one.id!r} is {one.text[:60]!r} and {other.text[:60]!r}; give each an id of its own"
        )


def _examples(source: str, split: str, policy: Policy) -> Iterable[Example]:
    """Return the examples. Those of a mined file, which have many negatives, are read one at a time."""
    path = source_path(source)
    if path.is_file() and (detection := detect_file(source, "examples")).format.name in _WITH_TEXTS:
        return stream_mined_examples(detection.path, policy)
    return read_examples(source, split, policy, targets=False)


def _has_examples(source: str, split: str) -> bool:
    path = source_path(source)
    if is_folder(path):
        return examples_path(path, split) is not None or has_judgements(path, split)
    return detect_file(source).format.gives("examples")


def stream_mined_examples(path: Path, policy: Policy) -> Iterator[Example]:
    """Yield the examples of a file that `jaxret mine` wrote; no passage stays in memory."""
    for where, record in read_records(detect_file(path, "examples"), policy):
        try:
            yield parse_tevatron_example(record, where, SharedPassages(policy))
        except DataError as error:
            policy.reject(error)


def read_concatenated(source: str, keep: int, policy: Policy) -> Iterator[Example]:
    """Yield the examples of a training file with their first `keep` negatives."""
    detection = detect_file(source, "examples")
    if detection.format.name in _WITH_TEXTS:
        examples: Iterable[Example] = stream_mined_examples(detection.path, policy)
    else:
        examples = read_examples(source, None, policy, targets=False)
    for example in examples:
        yield replace(example, negatives=example.negatives[:keep], negative_scores=example.negative_scores[:keep])


def split_by_target(examples: Iterable[Example], every_positive: bool, file_every_positive: bool) -> Iterator[Example]:
    """Yield examples for a file whose positives are all targets (file_every_positive), or only the first.

    Examples whose positives are all targets (every_positive) are split, one for each positive, if the file has one
    target for an example.
    """
    for example in examples:
        yield from examples_by_target(example) if every_positive and not file_every_positive else [example]
