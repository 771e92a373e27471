"""Read and write parquet files as records, with pyarrow if it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location
from jaxret.storage.atomic import atomic_write

_ROWS = 1024  # rows that are read or written at a time
_BYTES = 64 * 2**20  # upper bound of the values in memory at a time, also of the sample that shows the format
# A column that unpacks to more than `_SMALL_SIZE` bytes and more than `_RATIO` times its size in the file has no texts.
_SMALL_SIZE, _RATIO = 256 * 2**20, 200


def _module(location: Location) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise location.error(
            "missing package", "a parquet file needs a package", "pip install 'jaxret[data]'"
        ) from error
    return pyarrow.parquet


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, in order. Raises DataError if it is damaged, or unpacks to implausibly many bytes.

    A small file may hold one long value and many references to it. So texts stay references (`read_dictionary`) until
    a batch of rows is read.
    """
    module = _module(Location(path))
    try:
        with module.ParquetFile(path) as file:
            metadata = file.metadata
        columns = _require_plausible(metadata, path)  # columns of JSON are read as texts, not as an extension type
        with module.ParquetFile(path, read_dictionary=columns, arrow_extensions_enabled=False) as file:
            rows = _rows_per_batch(metadata)
            for group in range(metadata.num_row_groups):  # a batch cannot have references in lists of two groups
                for batch in file.iter_batches(rows, row_groups=[group]):
                    yield from _records(batch, Location(path, f"row group {group}"))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0]
        raise Location(path).error(
            "damaged file", f"pyarrow cannot read it ({reason})", "fetch or write it again"
        ) from error


def _records(batch: Any, location: Location) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch. Rows with long values are unpacked one after the other. Raises DataError if the values
    of a row are too long."""
    if _unpacked_bytes(batch.columns) > _BYTES and batch.num_rows > 1:
        for number in range(batch.num_rows):
            yield from _records(batch.slice(number, 1), location)
        return
    if (size := _unpacked_bytes(batch.columns)) > _BYTES:
        problem = f"a row unpacks to {size:,} bytes"
        raise location.error("too large", problem, f"at most {_BYTES:,} are allowed; split it")
    columns = [c.dictionary_decode() if hasattr(c, "dictionary_decode") else c for c in batch.columns]
    yield from type(batch).from_arrays(columns, names=batch.schema.names).to_pylist()


def _unpacked_bytes(arrays: Iterable[Any]) -> int:
    """Return the size of all values in bytes, where a value counts once for each reference to it."""
    import pyarrow.compute

    size = 0
    for array in arrays:
        if hasattr(array, "dictionary") and "int" not in str(array.dictionary.type):
            lengths = pyarrow.compute.binary_length(array.dictionary)
            size += pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0
        elif hasattr(array, "flatten") and array.type.num_fields:  # lists and structs
            parts = array.flatten()
            size += _unpacked_bytes(parts if isinstance(parts, list) else [parts])
        else:
            size += array.nbytes
    return size


def _require_plausible(metadata: Any, path: Path) -> list[str]:
    """Return the paths of the columns with texts. Raises DataError for a column that unpacks to implausibly many
    bytes."""
    texts: dict[str, None] = {}
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            size, compressed_size = column.total_uncompressed_size, max(column.total_compressed_size, 1)
            if size > _SMALL_SIZE and size > _RATIO * compressed_size:
                problem = f"{column.path_in_schema} unpacks from {compressed_size:,} bytes to {size:,}"
                raise Location(path).error("too large", problem, "no text does; fetch the file from its origin")
            width = metadata.schema.column(number).length  # bytes of a FIXED_LEN_BYTE_ARRAY, which has no references
            if width * _ROWS > _BYTES:
                problem = f"{column.path_in_schema} holds values of {width:,} bytes each"
                raise Location(path).error("too large", problem, "no text does; fetch the file from its origin")
            if column.physical_type == "BYTE_ARRAY" and metadata.schema.column(number).logical_type.type != "DECIMAL":
                texts[column.path_in_schema] = None
    return list(texts)


def _rows_per_batch(metadata: Any) -> int:
    """Return a number of rows whose values have at most `_BYTES` if each is stored once."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return int(min(max(_BYTES / max(largest, 1), 1), _ROWS))


def read_first_parquet_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows, or fewer if they are long."""
    rows, first, size = read_parquet(path), list[dict[str, Any]](), 0
    try:
        for row in islice(rows, count):
            first.append(row)
            size += sum(len(value) for value in row.values() if isinstance(value, str))
            if size > _BYTES:
                break
        return first
    finally:
        rows.close()  # type: ignore[attr-defined]


def write_parquet(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records a block at a time. A missing key becomes null. Without records no file is written.

    The first block decides the keys and types of columns. If a column has only nulls and empty lists, more records are
    read to decide its type. Raises DataError for a key that occurs later for the first time, also in an object inside a
    record.
    """
    module = _module(Location(path))
    import pyarrow

    iterator = iter(records)
    block = [dict(record) for record in islice(iterator, _ROWS)]
    names = dict.fromkeys(name for record in block for name in record)

    def schema(columns: Iterable[str]) -> Any:
        return pyarrow.Table.from_pylist([{name: record.get(name) for name in columns} for record in block]).schema

    while _has_unknown_type(block_schema := schema(names)) and (
        next_block := [dict(record) for record in islice(iterator, len(block))]
    ):
        block += next_block
    parents = [field.name for field in block_schema if field.type.num_fields]
    with atomic_write(path, "wb") as raw, module.ParquetWriter(raw, block_schema) as writer:
        while block:
            new_key = next((name for record in block for name in record if name not in names), "")
            # pyarrow silently drops keys of an object inside a record that the schema lacks.
            if new_key := new_key or _find_new_key(block_schema, schema(parents)):
                problem = f"the key {new_key!r} comes after record {_ROWS:,} for the first time"
                raise Location(path).error(
                    "late key", problem, "write JSON lines instead: their keys may differ from line to line"
                )
            writer.write_table(pyarrow.Table.from_pylist(block, schema=block_schema))
            block = [dict(record) for record in islice(iterator, _ROWS)]


def _find_new_key(first: Any, later: Any) -> str:
    """Return the first key of an object in `later`, a schema or type, that `first` lacks; "" if there is none."""
    import pyarrow

    if isinstance(first, pyarrow.ListType) and isinstance(later, pyarrow.ListType):
        return _find_new_key(first.value_type, later.value_type)
    if not all(isinstance(kind, pyarrow.StructType | pyarrow.Schema) for kind in (first, later)):
        return ""
    types = {field.name: field.type for field in first}
    keys = (_find_new_key(types[field.name], field.type) if field.name in types else field.name for field in later)
    return next(filter(None, keys), "")


def _has_unknown_type(schema: Any) -> bool:
    """Return whether the type of a column is not known yet, because it has only nulls and empty lists."""
    return any("null" in str(kind) for kind in schema.types)
