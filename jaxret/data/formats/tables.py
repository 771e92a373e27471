"""Tables: CSV, where a field may stand in quotes, and plain ones, where a tab or a line end always ends it.

CSV is read strictly, because a lenient reader takes one stray quote for the start of a field and swallows the lines up
to the next.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxret.data.files import LINE_LIMIT, DataError, Digest, PathLike, Policy, Where, decode, read_lines, too_long


def csv_rows(
    path: PathLike, policy: Policy, digest: Digest | None = None, delimiter: str = "\t"
) -> Iterator[tuple[Where, int, list[str]]]:
    """Yields (place of its first line, number, fields) of the rows of a CSV file. Blank lines are no rows; those that
    cannot be read are, so that skipping one does not renumber the others."""
    csv.field_size_limit(2**31 - 1)  # default 131,072 characters, less than a long document; this is C's long
    count, size = 0, 0
    first: Where | None = None  # line of the row that is being read
    undecodable: list[DataError] = []

    def text() -> Iterator[str]:
        nonlocal first, size
        for where, line in read_lines(path, digest, blank=b"\r\n"):
            if first is None:
                if line[0] in b"\r\n" and not line.strip(b"\r\n"):
                    continue
                first = where
            size += len(line)
            if size > LINE_LIMIT:  # perhaps a quote that is never closed
                raise too_long(first, "row")
            try:
                yield decode(line, where)
            except DataError as error:
                undecodable.append(error)  # the row must reach its end before it can be rejected
                yield line.decode("utf-8", errors="replace")

    reader = csv.reader(text(), delimiter=delimiter, strict=True)
    while True:
        first, size = None, 0
        undecodable.clear()
        try:
            row = next(reader, None)
            where = first or Where(Path(path))
        except csv.Error as error:
            where = first or Where(Path(path))
            found = f"the row that begins here is not well-formed CSV ({error})"
            remedy = 'put a field with a tab, a quote or a line end in double quotes, and write " inside as ""'
            policy.reject(where.error("broken quoting", found, remedy))
            count += 1
            continue
        if row is None:
            return
        if undecodable:
            policy.reject(undecodable[0])
        elif row:
            yield where, count, row
        count += bool(row)


def require_columns(row: Sequence[str], columns: Sequence[str], where: Where) -> None:
    if len(row) != len(columns):
        found = f"this row has {len(row)} columns, beginning {row[0][:40]!r}"
        remedy = f"{len(columns)} are expected, separated by tabs: {', '.join(columns)}"
        raise where.error("wrong columns", found, remedy)


_HEADER = re.compile(  # each field of it: what columns are called, and no text is
    r"(q|p|n|d|doc|query|passage|corpus|document|question|pos|neg|positive|negative)?[ _-]?(id|ids|no)"
    r"|query|question|passage|text|title|doc|document|contents|positive|negative|pos|neg|answers?|score|rank|relevance|label",
    re.IGNORECASE,
)


def is_header(row: Sequence[str]) -> bool:
    """Whether a first line names the columns: each field is what one is called."""
    return len(row) > 1 and all(_HEADER.fullmatch(field.strip()) for field in row)


def text_lines(path: PathLike, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, str]]:
    """Yields (place, line without its end) of the lines that are not blank."""
    for where, raw in read_lines(path, digest):
        try:
            line = decode(raw, where).rstrip("\r\n")
        except DataError as error:
            policy.reject(error)
            continue
        if line.strip():
            yield where, line


def tab_rows(
    path: PathLike, columns: Sequence[str], policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Where, list[str]]]:
    """Yields (place, fields) of the lines of a file without quoting; those with another number of columns are bad."""
    for where, line in text_lines(path, policy, digest):
        row = line.split("\t")
        if where.line == 1 and is_header(row):
            policy.note("header line, which is no data", where)
            continue
        try:
            require_columns(row, columns, where)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, row
