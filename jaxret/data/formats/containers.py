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
    values = {"array": _array, "object": _object, "csv": _csv, "parquet": _parquet}[container](file.path, policy)
    yield from policy.parse_records(values, require_object)
    if digest is not None:
        digest_file(file.path, digest)


def _table_records(path: Path, digest: Digest | None) -> Iterator[tuple[Location, Record]]:
    for number, record in enumerate(open_table(path).rows()):
        if digest is not None:
            digest.update(
                json.dumps(record, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
            )
        yield Location(path, f"row {number}"), record


def _array(path: Path, policy: Policy) -> Iterator[tuple[Location, Any]]:
    for number, value in enumerate(read_json_array(path)):
        yield Location(path, f"record {number}"), value


def _object(path: Path, policy: Policy) -> Iterator[tuple[Location, Any]]:
    for key, value in read_json_array(path, keyed=True):
        yield Location(path, f"record {key!r}"), value


def _csv(path: Path, policy: Policy) -> Iterator[tuple[Location, Any]]:
    rows = ((location, row) for location, _, row in csv_rows(path, policy, delimiter=","))
    _, header = next(rows, (None, []))
    for location, row in policy.parse_records(rows, lambda row, location: require_columns(row, header, location)):
        yield location, dict(zip(header, row))


def _parquet(path: Path, policy: Policy) -> Iterator[tuple[Location, Any]]:
    for number, value in enumerate(parquet.read_parquet(path)):
        yield Location(path, f"row {number}"), value
