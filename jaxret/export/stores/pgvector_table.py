"""A table of PostgreSQL with pgvector. Each vector of a passage is a row, with the type `vector` or `halfvec`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxret.data.records import Ranking
from jaxret.export.stores.corpus_rows import vectors_of_batch
from jaxret.export.stores.store_list import import_client
from jaxret.export.stores.vector_store import StoreTarget, VectorStore

_TYPES = {"string": "text", "int64": "bigint", "double": "double precision", "bool": "boolean"}
_MOST_NUMBERS = 16_000  # largest size of a vector


class PgvectorTable(VectorStore):
    """A table that is filled by binary COPY, with one transaction for each shard. If passages have several vectors, the
    column `number` has the index of the row's vector."""

    def __init__(self, target: StoreTarget) -> None:
        if not target.url:
            raise ValueError("--to=pgvector needs the address of a database: --url=postgresql://USER@HOST/DATABASE")
        if target.ragged:
            raise ValueError(
                "--to=pgvector: late interaction sums over a query's vectors, which pgvector does not support; use "
                "--to=qdrant or lancedb"
            )
        if target.dimension > _MOST_NUMBERS:
            raise ValueError(
                f"--to=pgvector: vectors have {target.dimension} dimensions, but pgvector holds {_MOST_NUMBERS}; "
                "encode shorter vectors (jaxret encode --dimension)"
            )
        psycopg, pgvector, self._sql, types = import_client(
            "pgvector", "psycopg", "pgvector", "psycopg.sql", "pgvector.psycopg"
        )
        self._connection = psycopg.connect(target.url, autocommit=True)
        self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        types.register_vector(self._connection)
        info, self._target, self._half = self._connection.info, target, pgvector.HalfVector
        self._name = self._sql.Identifier(target.table)
        self.address = f"{info.host}/{info.dbname}/{target.table}"
        self.query_dtype, self.notes = "float32", []
        if target.several:
            self.notes.append("Every vector of a passage is a row: group rows by id, and use the largest product.")

    def exists(self) -> bool:
        return self._first_value("SELECT to_regclass(%s) IS NOT NULL", self._name.as_string(self._connection)) is True

    def create(self) -> None:
        columns = [self._sql.SQL("{} {}").format(self._sql.Identifier(n), self._sql.SQL(t)) for n, t in self._columns()]
        key = '("id", "number")' if self._target.several else '("id")'
        self._execute(f"CREATE TABLE IF NOT EXISTS {{}} ({{}}, PRIMARY KEY {key})", self._sql.SQL(", ").join(columns))

    def _columns(self) -> list[tuple[str, str]]:
        """Return (name, type) of every column of the table."""
        kind = "halfvec" if self._target.dtype == "float16" else "vector"
        columns = []
        for field in self._target.schema:
            several = pa.types.is_list(field.type)
            if field.name != self._target.vector_column:
                kind_name = _TYPES[str(field.type.value_type if several else field.type)]
                columns.append((field.name, f"{kind_name}[]" if several else kind_name))
        if self._target.several:
            columns.append(("number", "bigint"))
        return [*columns, ("vector", f"{kind}({self._target.dimension})")]

    def keep_first(self, rows: int, entries: Sequence[dict[str, Any]]) -> None:
        self._execute('DELETE FROM {} WHERE "row" >= {}', self._sql.Literal(rows))

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        half = self._target.dtype == "float16"
        with self._connection.transaction(), self._connection.cursor() as cursor:
            copy = self._sql.SQL("COPY {} FROM STDIN WITH (FORMAT BINARY)").format(self._name)
            with cursor.copy(copy) as out:
                out.set_types([kind.partition("(")[0] for _, kind in self._columns()])
                for batch in batches:
                    other_columns = batch.drop_columns([self._target.vector_column]).to_pylist()
                    for row, vectors in zip(other_columns, vectors_of_batch(batch), strict=True):
                        require_no_nul(row)
                        for index, vector in enumerate(vectors):
                            number_column = [index] if self._target.several else []
                            out.write_row([*row.values(), *number_column, self._half(vector) if half else vector])
        return {}

    def count(self) -> int:
        first_vectors = ' WHERE "number" = 0' if self._target.several else ""
        return int(self._first_value(self._statement(f"SELECT count(*) FROM {{}}{first_vectors}")))

    def search(self, queries: Sequence[np.ndarray], k: int) -> Sequence[Ranking]:
        product = f'-("vector"::vector({self._target.dimension}) <#> %s)'  # <#> is the negative product
        if self._target.several:
            text = f'SELECT "id", max({product}) AS score FROM {{}} GROUP BY "id"'
        else:
            text = f'SELECT "id", {product} AS score FROM {{}}'
        statement = self._statement(f'{text} ORDER BY score DESC, "id" LIMIT {k}')
        # An index can only return ascending distances. This order is descending, so that every row is scored.
        return [self._connection.execute(statement, (query[0],)).fetchall() for query in queries]

    def close(self) -> None:
        self._connection.close()

    def _statement(self, text: str, *parts: Any) -> Any:
        return self._sql.SQL(text).format(self._name, *parts)

    def _execute(self, text: str, *parts: Any) -> None:
        self._connection.execute(self._statement(text, *parts))

    def _first_value(self, statement: Any, *values: Any) -> Any:
        """Return the first column of the first row."""
        return self._connection.execute(statement, values).fetchone()[0]


def require_no_nul(row: dict[str, Any]) -> None:
    """Raise ValueError for a text with the character U+0000, which PostgreSQL cannot store."""
    for name, value in row.items():
        if any("\0" in text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)):
            raise ValueError(
                f"passage {row['id']!r}: its {name} has the character U+0000, which PostgreSQL cannot store; correct "
                "the corpus, or write no texts (--notexts)"
            )
