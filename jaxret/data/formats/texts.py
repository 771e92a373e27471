"""Passages and queries that are records with an id and a text, under whatever names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxret.data.files import (
    DataError,
    Digest,
    Policy,
    Where,
    check_passage,
    check_query,
    normalise_question,
    require_key,
    require_strings,
)
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.records import Passage, Query


def id_of(record: Record, key: str, where: Where, numbers: bool = True) -> str:
    """The id under a key; numbers: it may be a whole one."""
    if numbers and type(record.get(key)) is int:
        return str(record[key])
    return require_key(record, key, str, where)


def passages_by(
    key: str, text: str = "text", title: str = "title", numbers: bool = True
) -> Callable[[Path, Policy, Digest | None], Iterator[tuple[Where, Passage]]]:
    """A reader of passages by the names of their keys; a title that is absent or null is an empty one."""

    def passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
        for where, record in read_records(path, policy, digest):
            try:
                yield where, passage_of(record, where, policy, key, text, title, numbers)
            except DataError as error:
                policy.reject(error)

    return passages


def passage_of(
    record: Record,
    where: Where,
    policy: Policy,
    key: str,
    text: str = "text",
    title: str = "title",
    numbers: bool = True,
) -> Passage:
    name = "" if record.get(title) is None else require_key(record, title, str, where)
    written = require_key(record, text, str, where)
    return check_passage(Passage(id_of(record, key, where, numbers), written, name), where, policy)


def queries_by(key: str, text: str = "text", numbers: bool = True) -> Callable[[Path, Policy], list[Query]]:
    """A reader of queries by the names of their keys; "answers" is a list of strings, where there is one."""

    def queries(path: Path, policy: Policy) -> list[Query]:
        found: list[Query] = []
        first: dict[str, Where] = {}
        for where, record in read_records(path, policy):
            try:
                query = query_of(record, where, key, text, numbers)
                refuse_duplicate(query.id, "query id", where, first)
            except DataError as error:
                policy.reject(error)
                continue
            found.append(query)
        return found

    return queries


def query_of(record: Record, where: Where, key: str, text: str = "text", numbers: bool = True) -> Query:
    written = normalise_question(require_key(record, text, str, where))
    answers = require_strings(record.get("answers") or [], "the value of 'answers'", where)
    return check_query(Query(id_of(record, key, where, numbers), written, answers), where)


def refuse_duplicate(key: str, what: str, where: Where, first: dict[str, Where]) -> None:
    """Raises if `key` is in `first` (key -> where it was seen), else notes it there."""
    if key in first:
        raise duplicate_error(key, what, where, first[key])
    first[key] = where


def duplicate_error(key: str, what: str, where: Where, first: Where) -> DataError:
    place = f"on line {first.line}" if isinstance(first.line, int) else f"at {first.line}"
    found = f"{what} {key!r} was used before, {place}"
    return where.error("duplicate id", found, "ids must be unique: rename or remove one")


def list_of(record: Record, key: str, where: Where, absent: bool = True) -> list[Any]:
    """The list under a key; absent: none and null are an empty one."""
    if absent and record.get(key) is None:
        return []
    return require_key(record, key, list, where)


def ids_of(record: Record, key: str, where: Where) -> tuple[str, ...]:
    """A list of ids, which may be whole numbers, each once."""
    values = list_of(record, key, where)
    for value in values:
        if type(value) not in (str, int):
            found = f"{key!r} holds {value!r}"
            raise where.error("wrong type", found, "a list of ids is expected, strings or whole numbers")
    return tuple(dict.fromkeys(str(value) for value in values))
