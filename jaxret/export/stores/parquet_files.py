"""Parquet files of vectors, texts and metadata, which most tools can read: part-NNNNN.parquet for each shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxret.data.records import Ranking
from jaxret.export.stores.corpus_rows import vectors_of_batch
from jaxret.export.stores.vector_store import StoreTarget, VectorStore
from jaxret.storage.atomic import atomic_write, sha256_file, sha256_json

_BLOCK_ROWS = 4096  # rows that are multiplied together


class ParquetFiles(VectorStore):
    """The files of an export. A batch is a row group."""

    def __init__(self, target: StoreTarget) -> None:
        if target.url or target.table:
            raise ValueError("--url and --table are of stores; --to=parquet writes files into --out")
        self._target, self._out = target, target.out
        self.address, self.query_dtype = str(target.out), "float32"
        self.notes: list[str] = []

    def exists(self) -> bool:
        return any(self._files())

    def keep_first(self, rows: int, entries: Sequence[dict[str, Any]]) -> None:
        for entry in entries:
            path = self._out / entry["file"]
            if not path.is_file() or sha256_file(path) != entry["sha256"]:
                raise ValueError(f"{path} was changed after it was written; remove {self._out} and export again")

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        path = self._out / f"part-{number:05d}.parquet"
        schema, column = self._target.schema, self._target.vector_column
        # Vectors have few equal numbers, so only the byte-stream split makes them compressible. DuckDB 2.0 cannot read
        # it for float16.
        leaf = "vectors.list.element.list.element" if self._target.several else "vector.list.element"
        options = {
            "compression": "zstd",
            "use_dictionary": [name for name in schema.names if name not in (column, "id", "row", "text")],
            "use_byte_stream_split": [leaf] if self._target.dtype == "float32" else False,
        }
        digests: list[str] = []
        with atomic_write(path, "wb") as file, pq.ParquetWriter(file, schema, **options) as writer:
            for batch in batches:
                writer.write_batch(batch, row_group_size=len(batch))
                digests.append(digest_of_rows(batch))
        for group, digest in enumerate(digests):
            read = pq.ParquetFile(path).read_row_group(group).combine_chunks().to_batches()
            if [digest_of_rows(read_batch) for read_batch in read] != [digest]:
                path.unlink()
                raise ValueError(f"{path}: read back, row group {group} has other rows; export again")
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}

    def count(self) -> int:
        return sum(pq.read_metadata(path).num_rows for path in self._files())

    def search(self, queries: Sequence[np.ndarray], k: int) -> Sequence[Ranking]:
        best: list[list[tuple[str, float]]] = [[] for _ in queries]
        query_vectors, begins = np.concatenate(queries), np.cumsum([0, *(len(query) for query in queries[:-1])])
        for path in self._files():
            for batch in pq.ParquetFile(path).iter_batches(_BLOCK_ROWS, columns=["id", self._target.vector_column]):
                ids, vectors = batch.column("id").to_pylist(), vectors_of_batch(batch)
                starts = np.cumsum([0, *(len(lists) for lists in vectors[:-1])])
                products = query_vectors @ np.concatenate(vectors).astype(np.float32).T
                scores = np.add.reduceat(np.maximum.reduceat(products, starts, axis=1), begins, axis=0)
                first = np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
                for hits, indices, row in zip(best, first, scores, strict=True):
                    hits += [(ids[index], float(row[index])) for index in indices]
                    hits.sort(key=lambda hit: -hit[1])
                    del hits[k:]
        return best

    def _files(self) -> list[Path]:
        return sorted(self._out.glob("part-*.parquet"))


def digest_of_rows(batch: pa.RecordBatch) -> str:
    """Return a digest of all columns, with the bits of the vectors."""
    column = batch.schema.names[-1]
    digest = hashlib.sha256(sha256_json(batch.drop_columns([column]).to_pydict()).encode())
    for vectors in vectors_of_batch(batch):
        digest.update(len(vectors).to_bytes(8, "little") + np.ascontiguousarray(vectors).tobytes())
    return digest.hexdigest()
