"""Filters by metadata: the rows of an encoded corpus that match them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxret.data.tokens.store import StringsBuilder
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.metadata import Field, read_fields
from jaxret.types import Ragged

# The longer operators come first, because a filter is split at the first one that follows a field.
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_OPERATORS = (":", *_COMPARISONS)
_NO_VALUES = Field(StringsBuilder().strings(), Ragged.from_lists([]))  # of a field that a part does not have
_NAMED_VALUES = 8  # values that an error names
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # of JSON
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[T ]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(\.[0-9]+)?(Z|[+-][0-9]{2}(?::[0-9]{2})?)?)?"
)


class FilterError(ValueError):
    """A filter that no passage can match, or that is not a filter. The message for a `Filter` names no file."""


class Filter(NamedTuple):
    """A condition of a value of a field."""

    field: str
    operator: str  # ":" for an equal value, or >=, >, <=, <
    value: str  # numbers and true as in JSON

    def __str__(self) -> str:
        return "".join(self)


class OrderedValue(NamedTuple):
    """A number, a date or a time. Values of the same kind are ordered by their place."""

    kind: str
    place: tuple[int, Decimal]


def matching_rows(encoded_corpus: EncodedCorpus, filters: Sequence[str | Filter]) -> np.ndarray:
    """Return the rows that match filters, numbered through all parts, int64 ascending. A row matches if it has, for
    each field of the filters, a value that is one of the values of FIELD:VALUE and is in all ranges, such as
    FIELD>=BOUND.

    Raises:
        FilterError: (a ValueError) no passage has the field, the value, or a value in the range.
        FileNotFoundError, ContractError: the metadata are not indexed yet, and the corpus was moved or changed.
        ShardError: the folder changed during the call.
        StorageError: the metadata are not indexed yet, and the files cannot be written.
    """
    tables = [read_fields(shards) for shards in encoded_corpus.shards]
    names = sorted({name for table in tables for name in table})
    by_field: dict[str, list[Filter]] = {}
    for item in filters:
        condition = _parse_filter(item, names, encoded_corpus.folder) if isinstance(item, str) else item
        by_field.setdefault(condition.field, []).append(condition)
    masks = [np.ones(shards.total_rows, bool) for shards in encoded_corpus.shards]
    for name, conditions in by_field.items():
        fields = [table.get(name, _NO_VALUES) for table in tables]
        for mask, field, places in zip(masks, fields, _matching_places(name, fields, conditions), strict=True):
            has_value = np.zeros(len(mask), bool)
            has_value[field.rows.take(np.fromiter(places, np.int64)).flat] = True
            mask &= has_value
    return np.concatenate([np.flatnonzero(mask) + first for mask, first in zip(masks, encoded_corpus.firsts)])


def _parse_filter(text: str, names: Sequence[str], folder: Path) -> Filter:
    """Return a filter from its text. A field may contain colons: the longest field that exists is taken."""
    for name in sorted((name for name in names if text.startswith(name)), key=len, reverse=True):
        for sign in _OPERATORS:
            if text.startswith(sign, len(name)):
                return Filter(name, sign, text[len(name) + len(sign) :])
    name, *values = re.split("[:<>]", text, maxsplit=1)
    if not values:
        raise FilterError(f"filter {text!r:.99}: FIELD:VALUE, or a range such as FIELD>=BOUND, is expected")
    if not names:
        raise FilterError(f"filter {text!r:.99}: the passages of {folder} have no metadata, only id, title and text")
    raise FilterError(f"filter {text!r:.99}: no passage has a field {name!r:.60}; the fields are {', '.join(names)}")


def _matching_places(name: str, fields: Sequence[Field], conditions: Sequence[Filter]) -> list[set[int]]:
    """Return the numbers of the values that satisfy the conditions, for a field of each part. Raises FilterError if no
    passage has one of the equal values, and if none has a value in the ranges."""
    equalities = [condition for condition in conditions if condition.operator == ":"]
    for condition in equalities:
        if not any(field.places(condition.value) for field in fields):
            problem = f"no passage has that value; {_describe_values(name, fields)}"
            if condition.value.startswith((">", "<")):
                problem += f"; a range is written without the colon: {name}{condition.value}"
            raise FilterError(f"filter {str(condition)!r:.99}: {problem}")
    equal = [{place for condition in equalities for place in field.places(condition.value)} for field in fields]
    ranges = [(condition, _parse_bound(condition)) for condition in conditions if condition.operator != ":"]
    if not ranges:
        return equal

    def in_ranges(value: str) -> bool:
        content = ordered_value(value)
        return content is not None and all(
            content.kind == bound.kind and _COMPARISONS[condition.operator](content.place, bound.place)
            for condition, bound in ranges
        )

    inside = [{place for place, value in enumerate(field.values) if in_ranges(value)} for field in fields]
    if not any(inside):
        text = " ".join(str(condition) for condition, _ in ranges)
        problem = "; ".join(_describe_order(name, fields, kind) for kind in dict.fromkeys(b.kind for _, b in ranges))
        raise FilterError(f"filter {text!r:.99}: no passage has a value in this range; {problem}")
    return [left & right for left, right in zip(inside, equal)] if equalities else inside


def _parse_bound(condition: Filter) -> OrderedValue:
    bound = ordered_value(condition.value)
    if bound is None:
        raise FilterError(
            f"filter {str(condition)!r:.99}: the bound must be a number as in JSON, or a date or a time in ISO 8601: "
            "2024-05-01, 2024-05-01T10:00:00, or 2024-05-01T10:00:00Z"
        )
    return bound


def ordered_value(text: str) -> OrderedValue | None:
    """Return a number of JSON, or a date or time in ISO 8601, with its exact place in the order of its kind; None for
    other texts."""
    if _NUMBER.fullmatch(text):
        try:
            return OrderedValue("a number", (0, Decimal(text)))
        except InvalidOperation:  # its exponent has more than 18 digits
            return None
    if not (match := _TIME.fullmatch(text)):
        return None
    date, clock, fraction, zone = match.groups(default="")
    try:
        moment = datetime.fromisoformat(f"{date}T{clock or '00:00'}{zone}")
    except ValueError:  # such as month 13
        return None
    since_start = moment.replace(tzinfo=None) - datetime.min - (moment.utcoffset() or timedelta(0))
    kind = "a date with a time and a zone" if zone else "a date with a time" if clock else "a date"
    return OrderedValue(kind, (since_start // timedelta(seconds=1), Decimal(fraction or 0)))


def _describe_order(name: str, fields: Iterable[Field], kind: str) -> str:
    """Return "FIELD is SMALLEST to LARGEST" of the values of a kind, for an error."""
    pairs = ((ordered_value(value), value) for field in fields for value in field.values)
    values = sorted((content.place, value) for content, value in pairs if content and content.kind == kind)
    if not values:
        return f"no value of {name} is {kind}: {_describe_values(name, fields)}"
    return f"{name} is {values[0][1]} to {values[-1][1]}"


def _describe_values(name: str, fields: Iterable[Field]) -> str:
    """Return "FIELD is VALUE, VALUE, ..." for an error, the most frequent values first."""
    counts: dict[str, int] = {}
    for field in fields:
        for place in np.argsort(-field.rows.lengths, kind="stable")[: _NAMED_VALUES + 1].tolist():
            value = field.values[place]
            counts[value] = counts.get(value, 0) + int(field.rows.lengths[place])
    values = sorted(counts, key=lambda value: -counts[value])
    names = [*map(repr, values[:_NAMED_VALUES]), *(["..."] if len(values) > _NAMED_VALUES else [])]
    return f"{name} is {', '.join(names)}"
