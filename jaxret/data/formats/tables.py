"""Tables: CSV, where a field may stand in quotes, and plain tables, where a tab or a line end always ends a field.

CSV is read strictly: for a lenient reader, one stray quote would join all lines up to the next quote into one field.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.lines import LINE_LIMIT, Digest, PathLike, decode_line, read_lines, too_long_error

csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is too low for a long document; this is C's limit


def csv_rows(
    path: PathLike, policy: Policy, digest: Digest | None = None, delimiter: str = "\t"
) -> Iterator[tuple[Location, int, list[str]]]:
    """Yield (location of the first line, row number, fields) of the rows of a CSV file.

    Blank lines are not counted as rows. Bad rows are counted, so that skipping one does not renumber the other rows.

    Args:
        path: the file, which may be compressed.
        policy: what to do with a bad row.
        digest: digest to which the decompressed bytes are added.
        delimiter: character between fields.
    """
    count, size = 0, 0
    first: Location | None = None  # first line of the row that is being read
    undecodable: list[DataError] = []

    def text() -> Iterator[str]:
        nonlocal first, size
        for location, line in read_lines(path, digest, blank=b"\r\n"):
            if first is None:
                if line[0] in b"\r\n" and not line.strip(b"\r\n"):
                    continue
                first = location
            size += len(line)
            if size > LINE_LIMIT:  # a quote that is never closed has this effect
                raise too_long_error(first, "row")
            try:
                yield decode_line(line, location)
            except DataError as error:
                undecodable.append(error)  # the csv module must read the row to its end before it can be rejected
                yield line.decode("utf-8", errors="replace")

    reader = csv.reader(text(), delimiter=delimiter, strict=True)
    while True:
        first, size = None, 0
        undecodable.clear()
        try:
            row = next(reader, None)
            location = first or Location(Path(path))
        except csv.Error as error:
            location = first or Location(Path(path))
            problem = f"the row that begins here is not well-formed CSV ({error})"
            remedy = 'put a field with a tab, a quote or a line end in double quotes, and write " inside as ""'
            policy.reject(location.error("broken quoting", problem, remedy))
            count += 1
            continue
        if row is None:
            return
        if undecodable:
            policy.reject(undecodable[0])
        elif row:
            yield location, count, row
        count += bool(row)


def require_columns(row: list[str], columns: Sequence[str], location: Location) -> list[str]:
    """Return the row. Raises DataError if its number of fields is not the number of `columns`, which are their
    names."""
    if len(row) != len(columns):
        problem = f"this row has {len(row)} columns, beginning {row[0][:40]!r}"
        remedy = f"{len(columns)} are expected, separated by tabs: {', '.join(columns)}"
        raise location.error("wrong columns", problem, remedy)
    return row


_HEADER = re.compile(  # a field of a header: names of columns that are not texts
    r"(q|p|n|d|doc|query|passage|corpus|document|question|pos|neg|positive|negative)?[ _-]?(id|ids|no)"
    r"|query|question|passage|text|title|doc|document|contents|positive|negative|pos|neg|answers?|score|rank|relevance|label",
    re.IGNORECASE,
)


def is_header(row: Sequence[str]) -> bool:
    """Return whether a first line is a header: each field is a usual name of a column."""
    return len(row) > 1 and all(_HEADER.fullmatch(field.strip()) for field in row)


def text_lines(path: PathLike, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Location, str]]:
    """Yield (location, line without its line end) of the lines that are not blank."""
    lines = policy.parse_records(read_lines(path, digest), decode_line)
    return ((location, line.rstrip("\r\n")) for location, line in lines if line.strip())


def tab_rows(
    path: PathLike, columns: Sequence[str], policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, list[str]]]:
    """Yield (location, fields) of the lines of a file without quoting. A header line is skipped.

    Args:
        path: the file, which may be compressed.
        columns: names of the columns, for errors; a line with another number of columns is bad.
        policy: what to do with a bad line.
        digest: digest to which the decompressed bytes are added.
    """

    def rows() -> Iterator[tuple[Location, list[str]]]:
        for location, line in text_lines(path, policy, digest):
            row = line.split("\t")
            if location.line == 1 and is_header(row):
                policy.note("header line, which is not data", location)
            else:
                yield location, row

    return policy.parse_records(rows(), lambda row, location: require_columns(row, columns, location))
