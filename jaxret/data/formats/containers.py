"""Read records from any container: JSON lines, a JSON array, one JSON object, CSV with a header, parquet, or a table of
a library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats import parquet
from jaxret.data.formats.format import DataFile, digest_file
from jaxret.data.formats.tables import csv_rows, require_columns
from jaxret.data.libraries.open_sets import open_table
from jaxret.data.lines import Digest, read_json_array, read_json_lines
from jaxret.data.record_checks import require_object
from jaxret.data.records import Record


def read_records(file: DataFile, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Location, Record]]:
    """Yield (location, record). When the last record has been yielded, `digest` has all decompressed bytes of the file,
    or the records of a named set's table as JSON. Raises DataError for a table without names for its columns."""
    container = file.container
    if container == "rows":
        yield from _table_records(file.path, digest)
        return
    if container == "unreadable":  # the reader of the likely container reports the error
        container = (
            "array" if Path(file.path.name.removesuffix(".gz").removesuffix(".zst")).suffix == ".json" else "lines"
        )
    if container in ("lines", "empty"):
        yield from read_json_lines(file.path, policy, digest)
        return
    if container == "table":
        problem = "this is a table without names for its columns"
        raise Location(file.path).error(
            "wrong format", problem, "records are expected: JSON, CSV with a header line, or parquet"
        )
    if container == "csv":
        values = _csv(file.path, policy)
    elif container == "object":
        pairs = read_json_array(file.path, keyed=True)
        values = ((Location(file.path, f"record {key!r}"), value) for key, value in pairs)
    else:
        kind, entries = ("record", read_json_array) if container == "array" else ("row", parquet.read_parquet)
        values = ((Location(file.path, f"{kind} {n}"), value) for n, value in enumerate(entries(file.path)))
    yield from policy.parse_records(values, require_object)
    digest_file(file.path, digest)


def _table_records(path: Path, digest: Digest | None) -> Iterator[tuple[Location, Record]]:
    for number, record in enumerate(open_table(path).rows()):
        if digest is not None:
            digest.update(
                json.dumps(record, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
            )
        yield Location(path, f"row {number}"), record


def _csv(path: Path, policy: Policy) -> Iterator[tuple[Location, Any]]:
    rows = ((location, row) for location, _, row in csv_rows(path, policy, delimiter=","))
    _, header = next(rows, (None, []))
    for location, row in policy.parse_records(rows, lambda row, location: require_columns(row, header, location)):
        yield location, dict(zip(header, row))
