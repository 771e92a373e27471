"""Readers of passages and queries from records with an id and a text. Formats give the names of the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxret.data.errors import Content, DataError, Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import DataFile, Format, record_format
from jaxret.data.lines import Digest
from jaxret.data.record_checks import check_passage, check_query, normalize_question, require_key, require_strings
from jaxret.data.records import Passage, Query, Record


def record_id(record: Record, key: str, location: Location, numbers: bool = True) -> str:
    """Return the id of a record.

    Args:
        record: record with the id.
        key: key of the id.
        location: location of the record, for errors.
        numbers: whether the id may be a whole number.
    """
    if numbers and type(record.get(key)) is int:
        return str(record[key])
    return require_key(record, key, str, location)


def passage_reader(
    key: str, text: str = "text", numbers: bool = True
) -> Callable[[DataFile, Policy, Digest | None], Iterator[tuple[Location, Passage]]]:
    """Return a reader of passages whose id and text have the keys `key` and `text`. A missing or null title is empty.
    With `numbers`, an id may be a whole number."""

    def passages(file: DataFile, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Location, Passage]]:
        def parse(record: Record, location: Location) -> Passage:
            return parse_passage(record, location, policy, key, text, numbers)

        return policy.parse_records(read_records(file, policy, digest), parse)

    return passages


def parse_passage(
    record: Record,
    location: Location,
    policy: Policy,
    key: str,
    text: str = "text",
    numbers: bool = True,
) -> Passage:
    """Return the passage of a record. A missing or null title is empty.

    Args:
        record: record of the passage.
        location: location of the record, for errors.
        policy: what to do with an empty passage.
        key: key of the id.
        text: key of the text.
        numbers: whether the id may be a whole number.

    Raises:
        DataError: a key is missing or has another type, the id is not one word, or the passage is empty.
    """
    name = "" if record.get("title") is None else require_key(record, "title", str, location)
    content = require_key(record, text, str, location)
    return check_passage(Passage(record_id(record, key, location, numbers), content, name), location, policy)


def query_reader(key: str, text: str = "text", numbers: bool = True) -> Callable[[DataFile, Policy], list[Query]]:
    """Return a reader of queries whose id and text have the keys `key` and `text`. Answers, if any, are a list of
    strings under "answers"."""

    def parse(record: Record, location: Location) -> Query:
        return parse_query(record, location, key, text, numbers)

    return lambda file, policy: unique_queries(read_records(file, policy), policy, parse)


def unique_queries(
    records: Iterable[tuple[Location, Content]], policy: Policy, parse: Callable[[Content, Location], Query]
) -> list[Query]:
    """Return the query of each record. A repeated id is an error."""
    first: dict[str, Location] = {}

    def parse_new(record: Content, location: Location) -> Query:
        query = parse(record, location)
        require_new_id(query.id, "query id", location, first)
        return query

    return [query for _, query in policy.parse_records(records, parse_new)]


def passage_format(name: str, title: str, key: str, text: str = "text") -> Format:
    """Return a format of passages as records.

    Args:
        name: name in NAME:PATH, which forces the format.
        title: usual name, for messages.
        key: key of the id.
        text: key of the text.
    """
    return record_format(name, title, (key, text), optional_keys=("title",), passages=passage_reader(key, text))


def query_format(name: str, title: str, key: str, text: str = "text") -> Format:
    """Return a format of queries as records.

    Args:
        name, title, key, text: see `passage_format`.
    """
    keys = ("answers", "instruction")
    return record_format(name, title, (key, text), optional_keys=keys, queries=query_reader(key, text))


def parse_query(record: Record, location: Location, key: str, text: str = "text", numbers: bool = True) -> Query:
    """Return the query of a record, with its answers and its instruction, if it has them.

    Args:
        record: record of the query.
        location: location of the record, for errors.
        key: key of the id.
        text: key of the text.
        numbers: whether the id may be a whole number.

    Raises:
        DataError: a key is missing or has another type, the id is not one word, or the text is blank.
    """
    question = normalize_question(require_key(record, text, str, location))
    answers = require_strings(record.get("answers") or [], "the value of 'answers'", location)
    return check_query(
        Query(record_id(record, key, location, numbers), question, answers, parse_instruction(record, location)),
        location,
    )


def parse_instruction(record: Record, location: Location, key: str = "instruction") -> str:
    """Return the instruction of a query, or "" if its record has none."""
    return "" if record.get(key) is None else require_key(record, key, str, location).strip()


def require_new_id(key: str, kind: str, location: Location, first: dict[str, Location]) -> None:
    """Raise DataError if an id occurred before. Otherwise add it to `first`.

    Args:
        key: the id.
        kind: "query id" or "passage id", for the error.
        location: location of the id.
        first: id -> location of its first occurrence; updated.
    """
    if key in first:
        raise duplicate_id_error(key, kind, location, first[key])
    first[key] = location


def duplicate_id_error(key: str, kind: str, location: Location, first: Location) -> DataError:
    """Return the error of a record whose id another record has.

    Args:
        key: the id.
        kind: name of the id, such as "query id".
        location: location of the record.
        first: location of the first record with the id.
    """
    earlier = f"on line {first.line}" if isinstance(first.line, int) else f"at {first.line}"
    problem = f"{kind} {key!r} was used before, {earlier}"
    return location.error("duplicate id", problem, "ids must be unique: rename or remove one")


def record_list(record: Record, key: str, location: Location) -> list[Any]:
    """Return a list of a record. A missing key and null mean an empty list."""
    return [] if record.get(key) is None else require_key(record, key, list, location)


def record_ids(record: Record, key: str, location: Location) -> tuple[str, ...]:
    """Return a list of ids of a record, without repetition. They may be whole numbers. Raises DataError for another
    value."""
    values = record_list(record, key, location)
    for value in values:
        if type(value) not in (str, int):
            problem = f"{key!r} holds {value!r}"
            raise location.error("wrong type", problem, "a list of ids is expected, strings or whole numbers")
    return tuple(dict.fromkeys(str(value) for value in values))


# The usual keys, without a library. It is the last format that detection tries, because records of other formats may
# have these keys, too.
FORMATS = (
    record_format(
        "records.texts",
        "passages or queries by id",
        ("id", "text"),
        optional_keys=("title", "answers", "instruction"),
        passages=passage_reader("id"),
        queries=query_reader("id"),
    ),
)
