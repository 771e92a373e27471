"""Check arguments. Each error is a ValueError with the name and the value of the argument, and what it must be."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxret.configs.options import TOO_LARGE
from jaxret.data.errors import Location
from jaxret.data.record_checks import check_passage, check_question
from jaxret.data.records import Passage

_LONGEST_PATH = 4_095  # largest number of bytes of a path that systems support


def require_kind(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise ValueError for a value of another type.

    Args:
        name: name of the argument.
        value: value of the argument.
        kind: type, or union of types.
        expected: what the value must be, for the error.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {_shown(value)}; it must be {expected}")


def require_flag(name: str, value: Any, optional: bool = False) -> None:
    """Raise ValueError unless a value is True or False (or None, if it is optional)."""
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ValueError(f"{name} is {_shown(value)}; it must be True or False{' or None' if optional else ''}")


def require_path(name: str, value: Any, expected: str = "a path", empty: bool = False) -> None:
    """Raise ValueError unless a value is a text or a path in UTF-8.

    Args:
        name: name of the argument.
        value: value of the argument.
        expected: what the value must be, for the error.
        empty: whether an empty text is allowed.
    """
    require_kind(name, value, str | os.PathLike, expected)
    text = os.fspath(value)
    require_kind(name, text, str, expected)
    if not (text or empty) or "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        non_empty = "" if empty else " and not empty"
        raise ValueError(f"{name} is {_shown(text)}; it must be {expected}, in UTF-8{non_empty}")
    if len(text.encode()) > _LONGEST_PATH:
        raise ValueError(f"{name} has {len(text.encode()):,} bytes; {_LONGEST_PATH:,} are allowed")


def whole_number(name: str, value: Any, expected: str = "a whole number") -> int:
    """Return a whole number of any integer type as an int. Raises ValueError for other values, including True and
    False."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {_shown(value)}; it must be {expected}") from None
    if abs(number) >= TOO_LARGE:
        raise ValueError(f"{name} is {_shown(value)}; it must have at most 18 digits")
    return number


def checked_questions(texts: Sequence[str]) -> list[str]:
    """Return the questions, normalized like the questions in files."""

    def check_text(number: int, text: str) -> str:
        try:
            return check_question(text).text
        except ValueError as error:
            raise ValueError(f"queries[{number}]: {error}") from error

    return [check_text(number, text) for number, text in enumerate(listed_texts(texts, str, "queries"))]


def checked_passages(texts: Iterable[str | Passage], name: str, first: int = 0) -> Iterator[Passage]:
    """Yield the passages of the argument `name`. The ids of plain texts are consecutive numbers from `first` on."""
    for number, text in enumerate(listed_texts(texts, str | Passage, name)):
        passage = Passage(str(first + number), text) if isinstance(text, str) else text
        for key in ("id", "text", "title"):
            require_kind(f"{name}[{number}].{key}", getattr(passage, key), str, "a text")
        if passage.metadata is not None:
            _require_json(f"{name}[{number}].metadata", passage.metadata)
        yield check_passage(passage, Location(Path(f"{name}[{number}]")))


def _require_json(name: str, metadata: Any) -> None:
    """Raise ValueError if metadata are not a JSON object that UTF-8 can hold."""
    require_kind(name, metadata, Mapping, "a dict of JSON values")
    try:
        content = json.dumps(dict(metadata), allow_nan=False, ensure_ascii=False).encode()
        is_json = json.loads(content) == metadata
    except (TypeError, ValueError, RecursionError):  # a type that JSON lacks, NaN, half of a surrogate pair, a circle
        is_json = False
    if not is_json:
        raise ValueError(f"{name} is {_shown(metadata)}; it must be a dict of JSON values: write a date as a text")


def listed_texts(texts: Any, kind: Any, name: str) -> Iterator[Any]:
    """Yield the texts of a list. Raises ValueError for a single text, and for a value that is not a list of texts."""
    if isinstance(texts, str | bytes | Passage | Mapping):
        remedy = "give its values" if isinstance(texts, Mapping) else "put it in [ ]"
        raise ValueError(f"{name} must be a list of texts, not one {type(texts).__name__}: {remedy}")
    require_kind(name, texts, Iterable, "a list of texts")
    try:
        texts = iter(texts)
    except TypeError as error:  # a NumPy array without axes
        raise ValueError(f"{name} is {_shown(texts)}; it must be a list of texts") from error
    for number, text in enumerate(texts):
        require_kind(
            f"{name}[{number}]", text, kind, "a text" if kind is str else "a text, or a jaxret.Passage(id, text)"
        )
        yield text


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python does not print integers with more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a value with too many levels"
