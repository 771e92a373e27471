"""A collection of Qdrant, on a server or in a folder (the client's local mode). Point ids are UUIDs of passage ids."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxret.data.records import Ranking
from jaxret.export.stores.corpus_rows import vectors_of_batch
from jaxret.export.stores.store_list import import_client
from jaxret.export.stores.vector_store import StoreTarget, VectorStore, without_password

_POINTS = 256  # points of a request
_SECONDS = 300  # time limit of a request
_NAMESPACE = uuid.NAMESPACE_URL


class QdrantCollection(VectorStore):
    """A collection whose distance is the product. A point replaces the point of the same passage, so that a repeated
    upsert changes nothing. The payload has id, row, title, text and metadata."""

    def __init__(self, target: StoreTarget) -> None:
        qdrant, self._models = import_client("qdrant", "qdrant_client", "qdrant_client.models")
        self._target, self.query_dtype, self.notes = target, "float32", []
        if "://" in target.url:
            key = os.environ.get("QDRANT_API_KEY")
            self._client = qdrant.QdrantClient(url=target.url, api_key=key, timeout=_SECONDS)
        else:
            self._client = qdrant.QdrantClient(path=target.url or str(target.out / "qdrant"))
            self.notes.append(
                "The client's local mode is slow for more than some thousand passages: give --url=http://..."
            )
        self.address = f"{without_password(target.url) or target.out / 'qdrant'}/{target.table}"

    def exists(self) -> bool:
        return bool(self._client.collection_exists(self._target.table))

    def create(self) -> None:
        if self.exists():
            return
        models, several = self._models, None
        if self._target.several:
            several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        vectors = models.VectorParams(
            size=self._target.dimension,
            distance=models.Distance.DOT,
            datatype=models.Datatype(self._target.dtype),
            multivector_config=several,
        )
        self._client.create_collection(self._target.table, vectors_config=vectors)

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        for batch in batches:
            for start in range(0, len(batch), _POINTS):
                self._upsert(batch.slice(start, _POINTS))
        return {}

    def _upsert(self, batch: pa.RecordBatch) -> None:
        payloads = batch.drop_columns([self._target.vector_column]).to_pylist()
        vectors = [lists.astype(np.float32).tolist() for lists in vectors_of_batch(batch)]
        points = self._models.Batch(
            ids=[str(uuid.uuid5(_NAMESPACE, payload["id"])) for payload in payloads],
            vectors=vectors if self._target.several else [vector for (vector,) in vectors],
            payloads=[{name: value for name, value in row.items() if value not in (None, [])} for row in payloads],
        )
        self._client.upsert(self._target.table, points, wait=True)

    def count(self) -> int:
        return int(self._client.count(self._target.table, exact=True).count)

    def search(self, queries: Sequence[np.ndarray], k: int) -> Sequence[Ranking]:
        results = []
        for query in queries:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Local mode performs exact", UserWarning)
                points = self._client.query_points(
                    self._target.table,
                    query=query.tolist() if self._target.several else query[0].tolist(),
                    limit=k,
                    search_params=self._models.SearchParams(exact=True),
                    with_payload=["id"],
                ).points
            results.append([(point.payload["id"], point.score) for point in points])
        return results

    def close(self) -> None:
        self._client.close()
