"""The description of a file format: how to recognize its files, and a reader for each kind of record (role) in them.

passages     (location, Passage)
queries      Query, with answer strings where the file has them
judgements   (location, Judgement)
examples     (location, Example): a query with all its positives and negatives, and a teacher's scores
id_examples  (location, IdExample): examples by ids, whose texts are in other files
rankings     RunLine: a passage retrieved for a query, with rank and score
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.lines import Digest, read_chunks
from jaxret.data.records import Example, Judgement, Passage, Query

ROLES = ("passages", "queries", "judgements", "examples", "rankings")


class IdExample(NamedTuple):
    """An example by ids."""

    query_id: str
    query: Query | None  # None: the text of the query is in another file
    positives: tuple[str, ...]  # ids of passages; () if unknown
    negatives: tuple[str, ...]  # ids of passages


def group_ids(rows: Iterable[tuple[Location, Sequence[str]]]) -> Iterator[tuple[Location, IdExample]]:
    """Yield one example for each query of rows of three ids (query, positive, negative), in the order of the queries'
    first rows."""
    by_query: dict[str, tuple[Location, dict[str, None], dict[str, None]]] = {}
    for location, (query, positive, negative) in rows:
        _, positives, negatives = by_query.setdefault(query, (location, {}, {}))
        positives[positive] = negatives[negative] = None
    for query, (location, positives, negatives) in by_query.items():
        yield location, IdExample(query, None, tuple(positives), tuple(negatives))


@dataclass(frozen=True)
class Format:
    """A file format: how to recognize it, and a reader for each role that it holds."""

    name: str  # Name in NAME:PATH, which forces the format
    title: str  # Usual name, for messages
    description: str  # Keys or columns of its files, for messages and docs/data.md
    matches: Callable[[FileSample], bool]  # Whether a sample has this format
    keys: tuple[str, ...] = ()  # Keys of its records, to find the nearest format and keys that are not read
    columns: tuple[int, ...] = ()  # Numbers of columns that its tables may have, to find the nearest format
    every_positive: bool = True  # Whether each positive of an example is a training target, or only the first one
    any_key: bool = False  # Whether records may have any keys, and all are read
    without_scores: bool = False  # Whether its rankings have no scores; the scores of lines are then 1 / rank
    # Whether a query's id is the number of its row or record, which means nothing in another file
    without_query_ids: bool = False
    # A sample -> which columns its reader takes for what, if their names do not say it
    column_roles: Callable[[FileSample], str] = lambda sample: ""
    # Role -> title, where the title depends on the role
    titles: Mapping[str, str] = field(default_factory=dict)
    passages: Callable[[DataFile, Policy, Digest | None], Iterator[tuple[Location, Passage]]] | None = None
    queries: Callable[[DataFile, Policy], Iterable[Query]] | None = None
    judgements: Callable[[DataFile, Policy], Iterator[tuple[Location, Judgement]]] | None = None
    examples: Callable[[DataFile, Policy], Iterator[tuple[Location, Example]]] | None = None
    id_examples: Callable[[DataFile, Policy], Iterator[tuple[Location, IdExample]]] | None = None
    rankings: Callable[[DataFile, Policy], Iterator[Any]] | None = None

    def gives(self, role: str) -> bool:
        """Return whether records of a role can be read: by the role's reader, or from examples."""
        if getattr(self, role) is not None:
            return True
        if self.id_examples is not None and role in ("examples", "judgements"):
            return True
        return self.examples is not None and role in ("passages", "queries", "judgements")

    def roles(self) -> list[str]:
        """Return the roles that a file of this format can have, see `gives`."""
        return [role for role in ROLES if self.gives(role)]


@dataclass(frozen=True)
class DataFile:
    """A file or table whose format has been detected."""

    path: Path
    format: Format
    container: str  # container of its records, see `FileSample`
    role: str = ""  # role for which the file was opened; "": any
    contents: str = ""  # container in words: "JSON lines", "2 columns"
    unread_keys: tuple[str, ...] = ()  # keys of the first records that the reader ignores

    @property
    def in_lines(self) -> bool:
        """Whether each record begins on a new line."""
        return self.container in ("lines", "table", "unreadable")

    def __str__(self) -> str:
        title = self.format.titles.get(self.role, self.format.title)
        unread_keys = f" (other keys: {', '.join(self.unread_keys)})" if self.unread_keys else ""
        return ", ".join(filter(None, (title, self.contents))) + unread_keys


def has_keys(*keys: str) -> Callable[[FileSample], bool]:
    """Return a function that tests whether a record of a sample has all these keys."""

    def fits(sample: FileSample) -> bool:
        return any(all(key in record for key in keys) for record in sample.records)

    return fits


def record_format(
    name: str, title: str, required_keys: tuple[str, ...], optional_keys: tuple[str, ...] = (), **readers: Any
) -> Format:
    """Return a format of JSON records that are recognized by their keys.

    Args:
        name: name in NAME:PATH, which forces the format.
        title: usual name, for messages.
        required_keys: keys by which a record is recognized.
        optional_keys: further keys that its readers look at.
        **readers: role -> reader, and other fields of `Format`.
    """
    optional_text = f", and perhaps {', '.join(optional_keys)}" if optional_keys else ""
    description = f"JSON records with {', '.join(required_keys)}{optional_text}"
    return Format(name, title, description, has_keys(*required_keys), keys=(*required_keys, *optional_keys), **readers)


def content_id(text: str, title: str = "") -> str:
    """Return the id of a passage in a file without ids: a hash of its content."""
    return hashlib.blake2b(f"{title}\0{text}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def first_present_key(record: dict[str, Any], keys: Iterable[str]) -> str:
    """Return the first of `keys` that a record has. If it has none, return the first key, for the error message."""
    keys = list(keys)
    return next((key for key in keys if record.get(key) is not None), keys[0])


def id_from_location(location: Location) -> str:
    """Return the id of a query in a file without ids: the number of its record, or of its line, from "0"."""
    if isinstance(location.line, int):
        return str(location.line - 1)
    name = str(location.line).partition(" ")[2]  # "record 7", or "record 'key'" in an object; a key may have spaces
    return str(ast.literal_eval(name)) if name[:1] in ("'", '"') else name


def digest_file(path: Path, digest: Digest | None) -> None:
    """Add a file's decompressed bytes to a digest, if there is one, for readers of records with several lines."""
    for _ in read_chunks(path, digest) if digest else ():
        pass


def hash_id(passage_id: str) -> int:
    """Return 64 bits of an id, to look it up among millions without holding them."""
    return int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest(), "little")


def distinct_passages(
    passages: Iterable[tuple[Location, Passage]], path: Path, digest: Digest | None
) -> Iterator[tuple[Location, Passage]]:
    """Yield the passages of the records in a file without repetition, then add the file's bytes to `digest`."""
    hashes: set[int] = set()
    for location, passage in passages:
        if (key := hash_id(passage.id)) not in hashes:
            hashes.add(key)
            yield location, passage
    digest_file(path, digest)
