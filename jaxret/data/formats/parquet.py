"""Parquet files as records; pyarrow reads them, where it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location
from jaxret.storage.atomic import atomic_write

_ROWS = 1024  # read at a time
_BYTES = 64 * 2**20  # of values held at a time; of the rows that show the format
# A column that unpacks to more bytes than this, and to so many times its size in the file, holds no text.
_SMALL_SIZE, _RATIO = 256 * 2**20, 200


def _module(location: Location) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise location.error("missing package", "a parquet file needs a package", "pip install pyarrow") from error
    return pyarrow.parquet


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, in order. Raises DataError if it is damaged, or unpacks to what no text does.

    A small file may hold one long value and many references to it. So texts stay references (`read_dictionary`) until
    a few rows are taken.
    """
    module = _module(Location(path))
    try:
        with module.ParquetFile(path) as file:
            metadata = file.metadata
        columns = _require_plausible(metadata, path)  # columns of JSON are texts, and no extension
        with module.ParquetFile(path, read_dictionary=columns, arrow_extensions_enabled=False) as file:
            rows = _rows_per_batch(metadata)
            for group in range(metadata.num_row_groups):  # references in lists cannot be of two groups
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
    """Yield rows: all at once, or one after the other if their values are long. Raises DataError if those of one are
    too long."""
    if _unpacked_bytes(batch.columns) > _BYTES and batch.num_rows > 1:
        for number in range(batch.num_rows):
            yield from _records(batch.slice(number, 1), location)
        return
    if (size := _unpacked_bytes(batch.columns)) > _BYTES:
        problem = f"a row unpacks to {size:,} bytes"
        raise location.error("too large", problem, f"rows have at most {_BYTES:,}; split it")
    columns = [c.dictionary_decode() if hasattr(c, "dictionary_decode") else c for c in batch.columns]
    yield from type(batch).from_arrays(columns, names=batch.schema.names).to_pylist()


def _unpacked_bytes(arrays: Iterable[Any]) -> int:
    """Return the bytes of all values, each as often as it is referred to."""
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
    """Return the paths of the columns of texts. Raises DataError for one that unpacks to what no text does."""
    texts: dict[str, None] = {}
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            size, compressed_size = column.total_uncompressed_size, max(column.total_compressed_size, 1)
            if size > _SMALL_SIZE and size > _RATIO * compressed_size:
                problem = f"{column.path_in_schema} unpacks from {compressed_size:,} bytes to {size:,}"
                raise Location(path).error("too large", problem, "no text does; fetch the file from its origin")
            width = metadata.schema.column(number).length  # of FIXED_LEN_BYTE_ARRAY, whose references are not kept
            if width * _ROWS > _BYTES:
                problem = f"{column.path_in_schema} holds values of {width:,} bytes each"
                raise Location(path).error("too large", problem, "no text does; fetch the file from its origin")
            if column.physical_type == "BYTE_ARRAY" and metadata.schema.column(number).logical_type.type != "DECIMAL":
                texts[column.path_in_schema] = None
    return list(texts)


def _rows_per_batch(metadata: Any) -> int:
    """Return how many rows have at most `_BYTES` of values, of which each is stored once."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return int(min(max(_BYTES / max(largest, 1), 1), _ROWS))


def read_first_parquet_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first rows: so many, or fewer if they are long."""
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
    """Write records a block at a time; a key that a record lacks is null there. Nothing is written of none. The first
    block decides the types of columns; a column with only nulls and empty lists is decided by later blocks. Raises
    DataError for a key that comes later, also one of an object inside."""
    module = _module(Location(path))
    import pyarrow

    iterator = iter(records)
    block = [dict(record) for record in islice(iterator, _ROWS)]
    names = dict.fromkeys(name for record in block for name in record)

    def schema(columns: Iterable[str]) -> Any:
        return pyarrow.Table.from_pylist([{name: record.get(name) for name in columns} for record in block]).schema

    while _open(block_schema := schema(names)) and (more := [dict(record) for record in islice(iterator, len(block))]):
        block += more
    parents = [field.name for field in block_schema if field.type.num_fields]
    with atomic_write(path, "wb") as raw, module.ParquetWriter(raw, block_schema) as writer:
        while block:
            late = next((name for record in block for name in record if name not in names), "")
            # pyarrow drops the keys of an object inside that the schema lacks, without a word.
            if late := late or _find_new_key(block_schema, schema(parents)):
                problem = f"the key {late!r} comes after record {_ROWS:,} for the first time"
                raise Location(path).error("late key", problem, "write JSON lines, which need not know their keys")
            writer.write_table(pyarrow.Table.from_pylist(block, schema=block_schema))
            block = [dict(record) for record in islice(iterator, _ROWS)]


def _find_new_key(kind: Any, other: Any) -> str:
    """Return the first key of the objects in `other`, a schema or type, that `kind` lacks there; "" for none."""
    import pyarrow

    if isinstance(kind, pyarrow.ListType) and isinstance(other, pyarrow.ListType):
        return _find_new_key(kind.value_type, other.value_type)
    if not all(isinstance(one, pyarrow.StructType | pyarrow.Schema) for one in (kind, other)):
        return ""
    own = {field.name: field.type for field in kind}
    keys = (_find_new_key(own[one.name], one.type) if one.name in own else one.name for one in other)
    return next(filter(None, keys), "")


def _open(schema: Any) -> bool:
    """Return whether the type of a column is not known yet: nothing but nulls and empty lists is in it."""
    return any("null" in str(kind) for kind in schema.types)
