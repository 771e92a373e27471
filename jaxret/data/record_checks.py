"""Checks of one record: keys, types, ids and texts. Each raises `DataError` with the record's location."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.records import Passage, Query

GRADE_LIMIT = 10**9


def require_object(value: Any, location: Location) -> dict[str, Any]:
    """Return the value. Raises DataError if it is not a JSON object, or if a key occurs twice in it."""
    if not isinstance(value, dict):
        raise location.error("wrong type", f"this is {describe_kind(value)}", "a JSON object {...} is expected")
    if isinstance(value, ObjectWithRepeatedKey):
        raise location.error("repeated key", f"the key {value.key!r} occurs twice in this object", "keep one of them")
    return value


def require_key(record: Mapping[str, Any], key: str, kind: type, location: Location) -> Any:
    """Return `record[key]`, which must exist and have the type.

    Args:
        record: record with the key.
        key: the key of the value.
        kind: the type of the value; true and false are not numbers.
        location: location of the record, for the error.

    Raises:
        DataError: the key is missing, or its value has another type.
    """
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise location.error("missing key", f"there is no key {key!r} (keys found: {keys})", f"add {key!r}")
    value = record[key]
    if type(value) is not kind:  # not isinstance: true and false are not numbers here
        problem = f"the value of {key!r} is {describe_kind(value)}: {shorten(value)}"
        raise location.error("wrong type", problem, f"{_KINDS[kind]} is expected")
    return value


def finite_number(value: Any) -> float | None:
    """Return a number, or a number in a string, as a float; None if it is not finite or too large for a float."""
    if isinstance(value, bool) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        return None  # Python reads "1_0" and digits of every script
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def require_grade(value: int, location: Location) -> int:
    """Return a judgement's grade. Raises DataError for a grade that is too large for measures to compute with."""
    if abs(value) > GRADE_LIMIT:
        raise location.error(
            "bad score",
            f"score {shorten(value)} is too large",
            f"grades are from -{GRADE_LIMIT:,} to {GRADE_LIMIT:,}",
        )
    return value


def require_strings(value: Any, name: str, location: Location) -> tuple[str, ...]:
    """Return a list of strings as a tuple. Raises DataError for another value."""
    if not isinstance(value, list) or not all(isinstance(element, str) for element in value):
        problem = f"{name} is {describe_kind(value)}: {shorten(value)}"
        raise location.error("wrong type", problem, "a list of strings is expected")
    return tuple(require_text(element, name, location) for element in value)


def require_text(value: str, name: str, location: Location) -> str:
    """Return a text. Raises DataError for half of a surrogate pair, which JSON can contain, but no tokenizer and no
    UTF-8 file."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"{name} holds half of a surrogate pair at character {error.start + 1}: {shorten(value)}"
            raise location.error("not UTF-8", problem, "write both halves, or remove it") from error
    return value


def require_id(value: str, name: str, location: Location) -> str:
    """Return an id. Raises DataError if it is empty or has white space, which separates the columns of run files, or
    control characters, which end a word or a text in other tools."""
    if value.split() != [value]:
        problem = f"{name} is empty" if not value else f"{name} {value!r} contains white space"
        raise location.error("bad id", problem, "an id is one word, because run and qrels files split at white space")
    if _CONTROL.search(value):
        remedy = "remove it, because some tools that read run and qrels files stop at it"
        raise location.error("bad id", f"{name} {shorten(value)} contains a control character", remedy)
    return require_text(value, name, location)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_passage(passage: Passage, location: Location, policy: Policy | None = None) -> Passage:
    """Return the passage. Raises DataError if its id is not one word, or if its title and text are blank and `policy`
    does not keep empty passages."""
    require_id(passage.id, "passage id", location)
    require_text(passage.title, "the title", location)
    require_text(passage.text, "the text", location)
    if _is_blank(passage.text) and _is_blank(passage.title):
        problem = f"passage {passage.id!r} is empty (no text, no title)"
        remedy = "give it a text, remove it, or encode it as it is with jaxret encode --on_error=keep"
        (policy or Policy()).reject_empty(location.error("empty passage", problem, remedy))
    return passage


def check_query(query: Query, location: Location) -> Query:
    """Return the query. Raises DataError if its id is not one word, or if its text is blank."""
    require_id(query.id, "query id", location)
    if _is_blank(query.text):
        raise location.error("empty query", f"query {query.id!r} has no text", "give it a text, or remove it")
    for text in (query.text, *query.answers, query.instruction):
        require_text(text, "the question, an answer or the instruction", location)
    return query


def check_question(text: str) -> Query:
    """Return a typed question as a Query with the id "0", normalized like queries of files.

    Raises ValueError if the question is blank or has half of a surrogate pair, which no tokenizer can read. Python also
    passes bytes of the command line that are not UTF-8 as such halves.
    """
    if _is_blank(text):
        raise ValueError("the question is blank; write what to search for")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        byte = 0xDC80 <= code <= 0xDCFF
        problem = f"byte 0x{code - 0xDC00:02x}, which is not UTF-8," if byte else "half of a surrogate pair"
        raise ValueError(f"the question holds {problem} at character {error.start + 1}; write it in UTF-8") from error
    return Query("0", normalize_question(text))


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def normalize_question(text: str) -> str:
    """Normalize a question as DPR does: the curly apostrophe becomes a straight one."""
    return text.replace("\u2019", "'")


def question_key(text: str) -> str:
    """Return a key that equal questions share: lower case, single spaces, none at the ends."""
    return " ".join(normalize_question(text).casefold().split())


_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def describe_kind(value: Any) -> str:
    """Return the kind of a JSON value in words, for messages: "a list", "null"."""
    return _KINDS.get(type(value), type(value).__name__)


def shorten(value: Any) -> str:
    """Return Python's notation of a value, cut to 60 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # 60: the message stays one readable line


class ObjectWithRepeatedKey(dict[str, Any]):
    """An object of a JSON file in which `key` occurs twice. Python's json would take the last value; `require_object`
    raises an error."""

    key = ""
