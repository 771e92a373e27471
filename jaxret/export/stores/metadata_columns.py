"""Metadata of passages as columns: one column for each field, with a type that fits all its values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.metadata import Field, read_fields

_LONGEST = 48  # characters of a column's name; PostgreSQL allows 63 bytes


class MetadataColumns:
    """The metadata fields for filters (`index/metadata.py`) by row. `fields` is {name of a column: field}.

    Whole numbers are int64, other numbers float64, true and false are booleans, other values are texts. If a passage
    has several values of a field, the column has lists, sorted as texts.
    """

    def __init__(self, encoded_corpus: EncodedCorpus, other_columns: Iterable[str]) -> None:
        """Read the fields, and choose column names that are not in `other_columns`."""
        self._parts = [read_fields(shards) for shards in encoded_corpus.shards]
        names = sorted({name for part in self._parts for name in part})
        self.fields = dict(zip(column_names(names, other_columns), names, strict=True))
        self.schema = pa.schema([pa.field(column, self._type(name)) for column, name in self.fields.items()])
        self._by_row: tuple[int, dict[str, tuple[np.ndarray, np.ndarray]]] = (-1, {})

    def _type(self, name: str) -> pa.DataType:
        fields = [part[name] for part in self._parts if name in part]
        kind = value_type([value for field in fields for value in field.values])
        several = any(len(np.unique(field.rows.flat)) < len(field.rows.flat) for field in fields)
        return pa.list_(kind) if several else kind

    def arrays(self, part: int, rows: np.ndarray) -> list[pa.Array]:
        """Return the columns for ascending rows of a part, with null or an empty list for rows without a value."""
        if self._by_row[0] != part:  # parts come one after the other
            self._by_row = part, {name: _by_row(field) for name, field in self._parts[part].items()}
        return [self._array(self._by_row[1], part, column.name, column.type, rows) for column in self.schema]

    def _array(
        self,
        by_row: dict[str, tuple[np.ndarray, np.ndarray]],
        part: int,
        column: str,
        kind: pa.DataType,
        rows: np.ndarray,
    ) -> pa.Array:
        name = self.fields[column]
        if name not in by_row:
            return pa.array([[] if pa.types.is_list(kind) else None] * len(rows), kind)
        owners, codes = by_row[name]
        values, begins = self._parts[part][name].values, np.searchsorted(owners, rows).tolist()
        ends = np.searchsorted(owners, rows, "right").tolist()
        convert = _CONVERT[kind.value_type if pa.types.is_list(kind) else kind]
        lists = [[convert(values[int(code)]) for code in codes[begin:end]] for begin, end in zip(begins, ends)]
        return pa.array(lists if pa.types.is_list(kind) else [next(iter(entries), None) for entries in lists], kind)


_CONVERT: dict[pa.DataType, Callable[[str], Any]] = {
    pa.int64(): int,
    pa.float64(): float,
    pa.bool_(): "true".__eq__,
    pa.string(): str,
}


def _by_row(field: Field) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows in ascending order, one for each value of a row; the index of each value)."""
    order = np.argsort(field.rows.flat, kind="stable")
    return field.rows.flat[order], np.repeat(np.arange(len(field.values)), field.rows.lengths)[order]


def value_type(values: Sequence[str]) -> pa.DataType:
    """Return the type that keeps all values, which are JSON, unchanged: 007 is a text."""
    if all(re.fullmatch(r"0|-?[1-9]\d{0,18}", value) and -(2**63) <= int(value) < 2**63 for value in values):
        return pa.int64()
    if all(map(_is_number, values)):
        return pa.float64()
    return pa.bool_() if set(values) <= {"true", "false"} else pa.string()


def _is_number(value: str) -> bool:
    try:
        number = float(value)
    except ValueError:
        return False
    return math.isfinite(number) and value in (json.dumps(number), str(int(number)) if abs(number) < 2**53 else "")


def column_names(fields: Sequence[str], other_columns: Iterable[str]) -> list[str]:
    """Return a column name for each field. A name has only letters, digits and _, which every store allows, and differs
    from all other names even if a store ignores case."""
    lower_names, names = {name.lower() for name in other_columns}, []
    for field in fields:
        plain = re.sub(r"[^A-Za-z0-9_]", "_", field)[:_LONGEST]
        plain = f"_{plain}" if not plain[:1].isalpha() else plain
        name, number = plain, 2
        while name.lower() in lower_names:
            name, number = f"{plain}_{number}", number + 1
        lower_names.add(name.lower())
        names.append(name)
    return names
