"""Parquet files as records; pyarrow reads them, where it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location
from jaxret.storage.atomic import atomic_write

_ROWS = 1024  # read at a time


def _module(location: Location) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise location.error("missing package", "a parquet file needs a package", "pip install pyarrow") from error
    return pyarrow.parquet


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, in order. Raises DataError if it is damaged."""
    module = _module(Location(path))
    try:
        with module.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0]
        raise Location(path).error(
            "damaged file", f"pyarrow cannot read it ({reason})", "fetch or write it again"
        ) from error


def read_first_parquet_rows(path: Path, count: int) -> list[dict[str, Any]]:
    rows = read_parquet(path)
    try:
        return list(islice(rows, count))
    finally:
        rows.close()  # type: ignore[attr-defined]


def write_parquet(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes records a block at a time; a key that a record lacks is null there. Nothing is written of none. What type
    a column has the first block says, or more of them where it has only nulls and empty lists. Raises DataError for a
    key that comes later."""
    module = _module(Location(path))
    import pyarrow

    iterator = iter(records)
    block = [dict(record) for record in islice(iterator, _ROWS)]
    names = dict.fromkeys(name for record in block for name in record)

    def schema() -> Any:
        return pyarrow.Table.from_pylist([{name: record.get(name) for name in names} for record in block]).schema

    while _open(block_schema := schema()) and (more := [dict(record) for record in islice(iterator, len(block))]):
        block += more
    with atomic_write(path, "wb") as raw, module.ParquetWriter(raw, block_schema) as writer:
        while block:
            if late := next((name for record in block for name in record if name not in names), ""):
                problem = f"the key {late!r} comes after record {_ROWS:,} for the first time"
                raise Location(path).error("late key", problem, "write JSON lines, which need not know their keys")
            writer.write_table(pyarrow.Table.from_pylist(block, schema=block_schema))
            block = [dict(record) for record in islice(iterator, _ROWS)]


def _open(schema: Any) -> bool:
    """Whether the type of a column is not known yet: nothing but nulls and empty lists is in it."""
    return any("null" in str(kind) for kind in schema.types)
