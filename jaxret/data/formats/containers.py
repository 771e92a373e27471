"""Records, whatever holds them: JSON lines, a JSON array, one JSON object, CSV with a header, parquet, or a library's
table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxret.data.files import (
    DataError,
    Digest,
    Policy,
    Where,
    read_json_array,
    read_json_lines,
    require_object,
)
from jaxret.data.formats import parquet
from jaxret.data.formats.format import feed
from jaxret.data.formats.head import read_head
from jaxret.data.formats.tables import csv_rows, require_columns
from jaxret.data.libraries.named import table

Record = dict[str, Any]


def read_records(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Record]]:
    """Yields (place, record); `digest` is fed the decompressed bytes of the file, by the time the last one came; of a
    named set's table its records, as JSON."""
    container = read_head(path).container
    if container == "rows":
        yield from _rows(path, digest)
        return
    if container == "unreadable":  # its reader says what is wrong
        container = "array" if Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix == ".json" else "lines"
    if container in ("lines", "empty"):
        yield from read_json_lines(path, policy, digest)
        return
    if container == "table":
        found = "this is a table without names for its columns"
        raise Where(path).error("wrong format", found, "records are expected: JSON, CSV with a header line, or parquet")
    values = {"array": _array, "object": _object, "csv": _csv, "parquet": _parquet}[container](path, policy)
    for where, value in values:
        try:
            record = require_object(value, where)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, record
    if digest is not None:
        feed(path, digest)


def _rows(path: Path, digest: Digest | None) -> Iterator[tuple[Where, Record]]:
    for number, record in enumerate(table(path).rows()):
        if digest is not None:
            digest.update(
                json.dumps(record, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
            )
        yield Where(path, f"row {number}"), record


def _array(path: Path, policy: Policy) -> Iterator[tuple[Where, Any]]:
    for number, value in enumerate(read_json_array(path)):
        yield Where(path, f"record {number}"), value


def _object(path: Path, policy: Policy) -> Iterator[tuple[Where, Any]]:
    for key, value in read_json_array(path, keyed=True):
        yield Where(path, f"record {key!r}"), value


def _csv(path: Path, policy: Policy) -> Iterator[tuple[Where, Any]]:
    header: list[str] = []
    for where, _, row in csv_rows(path, policy, delimiter=","):
        if not header:
            header = row
            continue
        try:
            require_columns(row, header, where)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, dict(zip(header, row))


def _parquet(path: Path, policy: Policy) -> Iterator[tuple[Where, Any]]:
    for number, value in enumerate(parquet.rows(path)):
        yield Where(path, f"row {number}"), value
