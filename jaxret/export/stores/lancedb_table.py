"""A table of LanceDB. It stores Arrow data, also float16 and lists of vectors, and has no primary key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxret.data.records import Ranking
from jaxret.export.stores.store_list import import_client
from jaxret.export.stores.vector_store import StoreTarget, VectorStore, without_password


class LanceTable(VectorStore):
    """A table in a folder or a bucket. A shard is one commit, so that a table never has a part of a shard."""

    def __init__(self, target: StoreTarget) -> None:
        (lancedb,) = import_client("lancedb", "lancedb")
        url = target.url or str(target.out / "lancedb")
        self._target, self._database = target, lancedb.connect(url)
        self.address = f"{without_password(url)}/{target.table}"
        self.query_dtype, self.notes = target.dtype, []
        if target.dtype == "float16":
            self.notes.append(
                "LanceDB rounds queries to float16, the type of the vectors. So were those of the comparison."
            )

    def exists(self) -> bool:
        return self._target.table in self._names()

    def _names(self) -> list[str]:
        names: list[str] = []
        token = None
        while True:
            page = self._database.list_tables(page_token=token)
            names += page.tables
            if not (token := page.page_token):
                return names

    def create(self) -> None:
        if not self.exists():
            self._database.create_table(self._target.table, schema=self._target.schema)
        self._table = self._database.open_table(self._target.table)

    def keep_first(self, rows: int, entries: Sequence[dict[str, Any]]) -> None:
        if self._table.count_rows() > rows:  # without a key, rows of an unfinished shard would occur twice
            self._table.delete(f"row >= {rows}")

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        self._table.add(pa.RecordBatchReader.from_batches(self._target.schema, batches))
        return {}

    def count(self) -> int:
        """Return the number of passages. The table has no key, so a repeated passage counts once."""
        rows = self._table.search().select(["row"]).limit(self._table.count_rows()).to_arrow()["row"]
        return int(pc.count_distinct(rows).as_py())

    def search(self, queries: Sequence[np.ndarray], k: int) -> Sequence[Ranking]:
        results = []
        for query in queries:
            vectors = query if len(query) > 1 else query[0]
            search = self._table.search(vectors, vector_column_name=self._target.vector_column).distance_type("dot")
            hits = search.bypass_vector_index().select(["id", "_distance"]).limit(k).to_list()
            # The distance is the sum of 1 - product over the query's vectors.
            results.append([(hit["id"], len(query) - hit["_distance"]) for hit in hits])
        return results
