"""What is mined for: training queries, with their positives, of any format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxret.data.files import DataError, Policy
from jaxret.data.formats import (
    example_files,
    files_of,
    found_queries,
    is_named,
    read_examples,
    read_queries,
    recognise,
    source_path,
)
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.places import examples_in, has_judgements, is_folder
from jaxret.data.formats.pool import Pool
from jaxret.data.formats.readers import keeps_first, targets_of
from jaxret.data.formats.tevatron import example_of
from jaxret.data.records import Example, Passage, Query
from jaxret.storage import sha256_json_lists

_WITH_TEXTS = ("tevatron.examples", "tevatron.first")  # formats of the files that `mine` writes


@dataclass(frozen=True)
class Asked:
    """A training query with its positives, of which the first is the target where not each is one."""

    query: Query
    positives: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Questions:
    """All of them, by id. every_positive: see Format."""

    asked: tuple[Asked, ...]
    every_positive: bool

    def digest(self) -> str:
        return sha256_json_lists(
            [one.query.id, one.query.text, list(one.query.answers), [p.id for p in one.positives]] for one in self.asked
        )


def read_asked(source: str, split: str, policy: Policy, positives: bool = True) -> Questions:
    """The training queries of a folder's split or of a file. positives=False: those without a positive too, as all of a
    file of questions are. Raises DataError for bad records, ValueError if there is no query."""
    if positives or _has_examples(source, split):
        found: dict[str, Asked] = {}
        shared: dict[Passage, Passage] = {}  # one object for each, however many queries have it
        for example in _examples(source, split, policy):
            before = found.get(example.query.id, Asked(example.query))
            require_same(before.query, example.query, source)
            both = dict.fromkeys((*before.positives, *example.positives))
            found[example.query.id] = Asked(before.query, tuple(shared.setdefault(one, one) for one in both))
        asked, every = tuple(found.values()), not keeps_first(source, split)
    else:
        asked, every = tuple(map(Asked, read_queries(source, policy, split))), False
    if not asked:
        raise ValueError(f"{source} has no training query; give a folder or file with some")
    return Questions(asked, every)


def question_files(source: str, split: str, positives: bool = True) -> list[Path]:
    """The files that `read_asked` reads, given the same."""
    if positives or _has_examples(source, split):
        path = source_path(source)
        return [path] if path.is_file() and not is_named(path) else example_files(source, split)
    return [file for found in found_queries(source, split) for file in files_of(found.path)]


def require_same(one: Query, other: Query, source: str) -> None:
    """Raises ValueError for two questions of one id: whatever goes by ids would take one of them for the other."""
    if one.text != other.text:
        raise ValueError(
            f"{source}: query {one.id!r} is {one.text[:60]!r} and {other.text[:60]!r}; give each an id of its own"
        )


def _examples(source: str, split: str, policy: Policy) -> Iterable[Example]:
    """The examples, whose negatives are not looked at: those of a mined file, which has many, one at a time."""
    path = source_path(source)
    if path.is_file() and (found := recognise(source, "examples")).format.name in _WITH_TEXTS:
        return stream_examples(found.path, policy)
    return read_examples(source, split, policy, targets=False)


def _has_examples(source: str, split: str) -> bool:
    path = source_path(source)
    if is_folder(path):
        return examples_in(path, split) is not None or has_judgements(path, split)
    return recognise(source).format.gives("examples")


def stream_examples(path: Path, policy: Policy) -> Iterator[Example]:
    """The examples of a file that `mine` wrote, one at a time: no passage is kept."""
    for where, record in read_records(path, policy):
        try:
            yield example_of(record, where, Pool(policy))
        except DataError as error:
            policy.reject(error)


def read_concatenated(source: str, keep: int, policy: Policy) -> Iterator[Example]:
    """The examples of a training file, each with its first negatives, `keep` of them."""
    found = recognise(source, "examples")
    if found.format.name in _WITH_TEXTS:
        examples: Iterable[Example] = stream_examples(found.path, policy)
    else:
        examples = read_examples(source, None, policy, targets=False)
    for example in examples:
        yield replace(example, negatives=example.negatives[:keep], negative_scores=example.negative_scores[:keep])


def as_written(examples: Iterable[Example], every: bool, written_every: bool) -> Iterator[Example]:
    """Examples each of whose positives is a target, or not (every), for a file in which each is, or not: where it is
    not, there is one for each positive."""
    for example in examples:
        yield from targets_of(example) if every and not written_every else [example]


def blocks(asked: Sequence[Asked], size: int) -> Iterator[Sequence[Asked]]:
    for start in range(0, len(asked), size):
        yield asked[start : start + size]
