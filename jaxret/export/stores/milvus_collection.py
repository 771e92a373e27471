"""A collection of Milvus, on a server or in a folder of Milvus Lite. The passage id is the primary key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxret.data.records import Ranking
from jaxret.export.stores.corpus_rows import vectors_of_batch
from jaxret.export.stores.store_list import import_client
from jaxret.export.stores.vector_store import StoreTarget, VectorStore, without_password

_MOST_BYTES = 65_535  # largest size of a text
_MOST_VALUES = 4096  # largest number of values in a list
_ROWS = 512  # rows of a request


class MilvusCollection(VectorStore):
    """A collection with the index FLAT and the metric IP. A row replaces the row of the same passage, so that a
    repeated upsert changes nothing."""

    def __init__(self, target: StoreTarget) -> None:
        if target.several:
            raise ValueError(
                "--to=milvus: a passage has several vectors, but a row of Milvus has one; use --to=qdrant or lancedb"
            )
        (self._milvus,) = import_client("milvus", "pymilvus")
        self._target, self.query_dtype, self.notes = target, "float32", []
        lite = "://" not in target.url
        if lite:
            import_client("milvus", "milvus_lite")
        self._half = target.dtype == "float16" and not lite
        if target.dtype == "float16" and lite:
            self.notes.append("Milvus Lite has no float16: it stores the same numbers as float32.")
        url = target.url or str(target.out / "milvus.db")
        self.address = f"{without_password(url)}/{target.table}"
        self._client = self._milvus.MilvusClient(url, token=os.environ.get("MILVUS_TOKEN", ""))

    def exists(self) -> bool:
        return bool(self._client.has_collection(self._target.table))

    def create(self) -> None:
        if self.exists():
            return
        types, schema = self._milvus.DataType, self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        text = {"max_length": _MOST_BYTES}
        kinds = {"string": types.VARCHAR, "int64": types.INT64, "double": types.DOUBLE, "bool": types.BOOL}
        for field in list(self._target.schema)[:-1]:
            several = pa.types.is_list(field.type)
            kind = kinds[str(field.type.value_type if several else field.type)]
            options: dict[str, Any] = text if kind == types.VARCHAR else {}
            if field.name == "id":
                options = {**text, "is_primary": True}
            elif several:
                kind, options = types.ARRAY, {**options, "element_type": kind, "max_capacity": _MOST_VALUES}
            elif field.nullable:
                options = {**options, "nullable": True}
            schema.add_field(field.name, kind, **options)
        kind = types.FLOAT16_VECTOR if self._half else types.FLOAT_VECTOR
        schema.add_field("vector", kind, dim=self._target.dimension)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        self._client.create_collection(self._target.table, schema=schema, index_params=index)

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        for batch in batches:
            for start in range(0, len(batch), _ROWS):
                self._upsert(batch.slice(start, _ROWS))
        self._client.flush(self._target.table)
        return {}

    def _upsert(self, batch: pa.RecordBatch) -> None:
        rows = batch.drop_columns(["vector"]).to_pylist()
        for row, vectors in zip(rows, vectors_of_batch(batch), strict=True):
            require_short_texts(row)
            row["vector"] = vectors[0] if self._half else vectors[0].astype(np.float32)
        self._client.upsert(self._target.table, rows)

    def count(self) -> int:
        self._client.load_collection(self._target.table)
        rows = self._client.query(self._target.table, filter="", output_fields=["count(*)"], consistency_level="Strong")
        return int(rows[0]["count(*)"])

    def search(self, queries: Sequence[np.ndarray], k: int) -> Sequence[Ranking]:
        dtype = np.float16 if self._half else np.float32
        results = self._client.search(
            self._target.table,
            data=[query[0].astype(dtype) for query in queries],
            limit=k,
            output_fields=["id"],
            search_params={"metric_type": "IP"},
            consistency_level="Strong",
        )
        return [[(hit["id"], hit["distance"]) for hit in hits] for hits in results]

    def close(self) -> None:
        self._client.close()


def require_short_texts(row: dict[str, Any]) -> None:
    """Raise ValueError for a text that is too long for Milvus."""
    for name, value in row.items():
        if isinstance(value, str) and (size := len(value.encode())) > _MOST_BYTES:
            raise ValueError(
                f"passage {row['id']!r}: its {name} has {size:,} bytes, but Milvus holds {_MOST_BYTES:,}; cut the "
                "passages, or write no texts (--notexts)"
            )
