"""What a format is: how a file of it looks, and what it gives.

A file gives some of these, each by a reader of its own:

    passages    (place, Passage)
    queries     Query, with answer strings where the file has them
    judgements  (place, Judgement)
    examples    (place, Example): a query with all its positives and negatives, and a teacher's scores
    named       (place, Named): the same by ids, whose texts are in other files
    rankings    RunLine: what was retrieved for a query, with rank and score
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.data.files import Digest, Policy, Where, read_chunks
from jaxret.data.formats.head import Head
from jaxret.data.records import Example, Judgement, Passage, Query

ROLES = ("passages", "queries", "judgements", "examples", "rankings")


class Named(NamedTuple):
    """An example by ids. `query` is None where its text is in another file too; without `positives` it is unknown
    which of the documents are relevant."""

    query_id: str
    query: Query | None
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


@dataclass(frozen=True)
class Format:
    """`name` forces it (NAME:PATH); `title` is what people call it; `looks` says what a file of it has. `keys` and
    `columns` are for who looks for the nearest one. `every_positive`: each positive of an example is a target of
    training; else the first one is. any_key: its records' keys may be
    called anything, and all are read. ranks_alone: its rankings say no scores; those of their lines are 1 / rank."""

    name: str
    title: str
    looks: str
    fits: Callable[[Head], bool]
    keys: tuple[str, ...] = ()
    columns: tuple[int, ...] = ()
    every_positive: bool = True
    any_key: bool = False
    ranks_alone: bool = False
    titles: Mapping[str, str] = field(default_factory=dict)  # where the title depends on what is read of it
    passages: Callable[[Path, Policy, Digest | None], Iterator[tuple[Where, Passage]]] | None = None
    queries: Callable[[Path, Policy], Iterable[Query]] | None = None
    judgements: Callable[[Path, Policy], Iterator[tuple[Where, Judgement]]] | None = None
    examples: Callable[[Path, Policy], Iterator[tuple[Where, Example]]] | None = None
    named: Callable[[Path, Policy], Iterator[tuple[Where, Named]]] | None = None
    rankings: Callable[[Path, Policy], Iterator[Any]] | None = None

    def gives(self, role: str) -> bool:
        """Whether it has what is asked for, or examples that it can be taken from."""
        if getattr(self, role) is not None:
            return True
        if self.named is not None and role in ("examples", "judgements"):
            return True
        return self.examples is not None and role in ("passages", "queries", "judgements")

    def roles(self) -> list[str]:
        return [role for role in ROLES if self.gives(role)]


def has(*keys: str) -> Callable[[Head], bool]:
    """Whether the records have these keys."""

    def fits(head: Head) -> bool:
        return any(all(key in record for key in keys) for record in head.records)

    return fits


def text_id(text: str, title: str = "") -> str:
    """The id of a passage in a file that has none: its content."""
    return hashlib.blake2b(f"{title}\0{text}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def value_of(record: dict[str, Any], keys: Iterable[str]) -> str:
    """The first of some keys that a record has; the first of all if it has none, for the error to name."""
    keys = list(keys)
    return next((key for key in keys if record.get(key) is not None), keys[0])


def own_id(where: Where) -> str:
    """The id of a query in a file that has none: the number of its record, or of its line, from "0"."""
    if isinstance(where.line, int):
        return str(where.line - 1)
    name = str(where.line).partition(" ")[2]  # "record 7", or "record 'key'" of an object: all of the key counts
    return str(ast.literal_eval(name)) if name[:1] in ("'", '"') else name


def feed(path: Path, digest: Digest) -> None:
    """For readers that read records of several lines: feeds the file to a digest when they are done."""
    for _ in read_chunks(path, digest):
        pass
