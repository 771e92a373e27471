"""Read the beginning of a file, from which its format is detected. The file's name plays no part."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jaxret.data import lines
from jaxret.data.errors import Location
from jaxret.data.formats import parquet
from jaxret.data.formats.tables import is_header
from jaxret.data.libraries.named import is_named
from jaxret.data.libraries.open_sets import open_table

_SAMPLE_BYTES = 2**18  # bytes of a sample; `LINE_LIMIT` bytes if these hold no complete record
_RECORDS = 50
# First bytes -> (kind of file, remedy).
_KINDS = {
    b"%PDF-": ("a PDF", "write its text to a file of docs/data.md"),
    b"PK\x03\x04": ("a zip archive", "unpack it, and give the folder or a file in it"),
    b"7z\xbc\xaf": ("a 7z archive", "unpack it, and give the folder or a file in it"),
    b"BZh": ("compressed by bzip2", "unpack it, or compress it by gzip or Zstandard"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it, or compress it by gzip or Zstandard"),
    b"SQLite format 3\0": ("an SQLite database", "write its rows as JSON lines"),
    b"version https://git-lfs": ("a Git LFS pointer, not the file itself", "fetch the file with git lfs pull"),
    b"<!doctype html": ("a web page", "download the file itself"),
    b"<html": ("a web page", "download the file itself"),
}
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_LONGEST_ID = 100  # characters
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
_FIELD = re.compile(r"\"?[A-Za-z_][\w .-]{0,40}\"?\r?")


@dataclass(frozen=True)
class FileSample:
    """The first records or lines of a file."""

    # "lines", "array" or "object" (JSON), "csv", "parquet", "rows" (a table of a named set), "table" (fields between
    # tabs or white space), "empty", or "unreadable" (no complete record)
    container: str
    records: tuple[dict[str, Any], ...] = ()  # The first records; () for a table
    lines: tuple[str, ...] = ()  # The first lines of a table, without their ends

    @property
    def columns(self) -> int:
        """The most frequent number of columns in a table's lines, and the smallest of equally frequent ones."""
        counts = Counter(self.counts)
        return min(counts, key=lambda count: (-counts[count], count)) if counts else 0

    @property
    def counts(self) -> list[int]:
        """Number of columns in each line of a table."""
        return [len(line.split("\t")) for line in self.lines]

    @property
    def rows(self) -> list[list[str]]:
        """The rows with `columns` fields, without a header row."""
        split = [line.split("\t") for line in self.lines]
        return [row for number, row in enumerate(split) if len(row) == self.columns and (number or not is_header(row))]

    @property
    def words(self) -> list[list[str]]:
        """The fields of each line between white space."""
        return [line.split() for line in self.lines]

    def describe(self) -> str:
        """Return the keys or columns of the sample, for an error."""
        if self.records:
            keys = ", ".join(map(repr, self.records[0])) or "none"
            return f"its records have the keys {keys}"
        if self.lines:
            count = len(self.words[0])
            words = f"no tabs, and the first one has {count} word{'s' if count != 1 else ''}"
            columns = f"{self.columns} columns between tabs" if self.columns > 1 else words
            return f"its lines have {columns}: {self.lines[0][:60]!r}"
        return "nothing in it can be read"


def is_text(field: str) -> bool:
    """Return whether a field is a text, not an id: it has several words, or it is long (some scripts have no
    spaces)."""
    return len(field.split()) > 1 or len(field) > _LONGEST_ID or (not field.isascii() and len(field) > 8)


def is_number(field: str) -> bool:
    """Return whether a field is a decimal number, such as "-1", "0.5" or "1e-3". "nan" and "inf" are no numbers."""
    return bool(_NUMBER.fullmatch(field.strip()))


def holds_for_most(rows: list[list[str]], test: Callable[[list[str]], bool]) -> bool:
    """Return whether a test holds for at least half of the rows, so that a single bad row does not change the
    format."""
    return bool(rows) and 2 * sum(map(test, rows)) >= len(rows)


def read_sample(path: Path) -> FileSample:
    """Return the beginning of a file. Raises DataError if the file does not exist, or if its beginning is damaged or of
    a kind that is not read."""
    if is_named(path):
        return FileSample("rows", tuple(islice(open_table(path).rows(), _RECORDS)))
    for limit in (_SAMPLE_BYTES, lines.LINE_LIMIT):
        data, is_complete = _read_beginning(path, limit)
        if data.startswith(b"PAR1"):
            return FileSample("parquet", tuple(parquet.read_first_parquet_rows(path, _RECORDS)))
        for begin, (kind, remedy) in _KINDS.items():
            if data[: len(begin)].lower() == begin.lower():
                raise Location(path).error("other kind of file", f"this is {kind}", remedy)
        if _is_utf16(data):
            remedy = "convert it to UTF-8 (iconv -f utf-16 -t utf-8)"
            raise Location(path).error("not UTF-8", "this file is UTF-16", remedy)
        if _is_binary(data):
            remedy = "give text, plain or compressed by gzip or Zstandard, or parquet"
            raise Location(path).error("not UTF-8", f"this is a binary file, which begins with {data[:4]!r}", remedy)
        sample = _parse_sample(data, is_complete)
        if is_complete or sample.container != "unreadable":
            return sample
    return sample


def _read_beginning(path: Path, limit: int) -> tuple[bytes, bool]:
    """Return at least `limit` decompressed bytes, and whether the file has no more."""
    parts, size = [], 0
    for chunk in lines.read_chunks(path):
        parts.append(chunk)
        size += len(chunk)
        if size >= limit:
            return b"".join(parts), False
    return b"".join(parts), True


def _is_utf16(data: bytes) -> bool:
    """Return whether the bytes are UTF-16: they have a byte order mark, or every other byte of the beginning is 0."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    begin = data[:64]
    zeros = [not any(begin[start::2]) for start in (0, 1)]
    return len(begin) >= 8 and any(zeros) and not all(zeros)


def _is_binary(data: bytes) -> bool:
    """Return whether the first line is binary, not a text with a byte or two of damage: it has many control characters
    and is not UTF-8."""
    begin = data[:1024].split(b"\n", 1)[0]
    return len(_CONTROLS.findall(begin)) > max(2, len(begin) // 32) and "\ufffd" in begin.decode("utf-8", "replace")


def _parse_sample(data: bytes, is_complete: bool) -> FileSample:
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    begin = text.lstrip(" \t\r\n")
    if not begin:
        return FileSample("empty" if is_complete else "unreadable")
    lines = text.split("\n")
    if not is_complete:
        lines.pop()  # the last line may be cut
    lines = [line for line in lines[: 20 * _RECORDS] if line.strip()][:_RECORDS]
    if begin[0] == "[" and (sample := _array(begin)):
        return sample
    if begin[0] == "{" and (sample := _objects(lines, begin)):
        return sample
    return _table_sample([line.rstrip("\r") for line in lines])


def _array(text: str) -> FileSample | None:
    values: list[Any] = []
    position = 1
    while len(values) < _RECORDS:
        position = re.compile(r"[\s,]*").match(text, position).end()  # type: ignore[union-attr]
        if text[position : position + 1] == "]" and not values:
            return FileSample("empty")
        try:
            value, position = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        values.append(value)
    return FileSample("array", _dicts(values)) if _dicts(values) else None


def _objects(lines: list[str], begin: str) -> FileSample | None:
    """Return a sample of JSON lines, or of one object whose values are the records. None if no record is complete."""
    json_values = []
    for line in lines:
        try:
            json_values.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    records = _dicts(json_values)
    if len(records) == 1 and (values := _dicts(list(records[0].values()))) and len(values) == len(records[0]):
        return FileSample("object", values)
    if records:
        return FileSample("lines", records)
    first = re.match(r'\{\s*"[^"]*"\s*:\s*', begin)
    try:
        value = json.JSONDecoder().raw_decode(begin, first.end())[0] if first else None
    except (ValueError, RecursionError):
        value = None
    return FileSample("object", (value,)) if isinstance(value, dict) else None


def _dicts(values: list[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(value for value in values if isinstance(value, dict))


def _csv_records(lines: list[str]) -> tuple[dict[str, Any], ...]:
    """Return the records of CSV with a header line, or () if the lines are not such a CSV."""
    try:
        header = next(csv.reader(lines[:1]))
        if not all(_FIELD.fullmatch(field) for field in header) or len(set(header)) != len(header):
            return ()
        return tuple(dict(zip(header, row)) for row in csv.reader(lines[1:])) or (dict.fromkeys(header, ""),)
    except csv.Error:  # a carriage return inside a line
        return ()


def _table_sample(lines: list[str]) -> FileSample:
    if not lines:
        return FileSample("unreadable")
    if "\t" not in lines[0] and "," in lines[0] and (records := _csv_records(lines)):
        return FileSample("csv", records)
    if max(len(line.split()) for line in lines) < 2 or lines[0].lstrip().startswith(("{", "[{")):
        return FileSample("unreadable")
    return FileSample("table", lines=tuple(lines))
