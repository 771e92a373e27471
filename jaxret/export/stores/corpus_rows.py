"""The rows of an encoded corpus as Arrow record batches, shard by shard, for all stores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from jaxret.data.records import Passage
from jaxret.export.stores.metadata_columns import MetadataColumns
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.passages import Passages
from jaxret.types import Ragged

_ROWS, _NUMBERS = 8192, 2**23  # largest number of rows, and of numbers in the vectors, of a batch
COLUMNS = ("id", "row", "title", "text", "vector", "vectors", "number")  # names that metadata cannot have


class CorpusRows:
    """The remaining rows of a corpus, with the columns id, row (its number), title, text, metadata, and vectors.

    Vectors have the stored type. If every passage has one vector, their column is `vector`, else `vectors` with lists.
    """

    def __init__(self, encoded_corpus: EncodedCorpus, texts: bool = True) -> None:
        """Open the rows, with titles, texts and metadata if `texts`. Raises ValueError for sparse vectors, and the
        errors of opening `Passages`."""
        if encoded_corpus.sparse:
            raise ValueError(
                f"the vectors in {encoded_corpus.folder} are weights of words, but stores need dense vectors; use "
                "--to=anserini"
            )
        if not encoded_corpus.total_rows:
            raise ValueError(f"{encoded_corpus.folder} has no passage to export: all were deleted")
        self.encoded_corpus, self.texts = encoded_corpus, texts
        self.dtype: str = encoded_corpus.shards[0].manifest.dtype
        self.several = encoded_corpus.ragged or encoded_corpus.shards[0].vectors_per_row > 1
        self._passages = [Passages.of_shards(shards) for shards in encoded_corpus.shards] if texts else []
        self._metadata = MetadataColumns(encoded_corpus, COLUMNS) if texts else None
        vector = pa.list_(pa.from_numpy_dtype(self.dtype), encoded_corpus.dimension)
        head = [pa.field("id", pa.string(), False), pa.field("row", pa.int64(), False)]
        if self._metadata:
            head += [pa.field(name, pa.string(), False) for name in ("title", "text")] + list(self._metadata.schema)
        last = pa.field("vectors", pa.list_(vector), False) if self.several else pa.field("vector", vector, False)
        self.schema = pa.schema([*head, last])

    @property
    def fields(self) -> dict[str, str]:
        """Return {column: field of the metadata}."""
        return self._metadata.fields if self._metadata else {}

    def __iter__(self) -> Iterator[tuple[int, int, Iterator[pa.RecordBatch]]]:
        """Yield (first row, number of rows, batches) for each shard."""
        for first, shard in self.encoded_corpus:
            yield first, len(shard), self._shard_batches(first, shard)

    def _shard_batches(self, first: int, shard: Any) -> Iterator[pa.RecordBatch]:
        vectors = shard.lengths.sum() if self.encoded_corpus.ragged else len(shard) * shard.shape[1]
        numbers_per_row = max(1, int(vectors) * self.encoded_corpus.dimension // len(shard))
        step = max(1, min(_ROWS, _NUMBERS // numbers_per_row))
        for start in range(0, len(shard), step):
            rows = np.arange(start, min(start + step, len(shard)))
            block = shard.take(rows) if self.encoded_corpus.ragged else shard[start : start + len(rows)]
            yield self._batch(first + rows, block)

    def _batch(self, rows: np.ndarray, vectors: Any) -> pa.RecordBatch:
        ids = self.encoded_corpus.ids(rows)
        columns = [pa.array(ids, pa.string()), pa.array(rows, pa.int64())]
        if self._metadata:
            ((part, _, part_rows),) = self.encoded_corpus.by_part(rows)  # a shard is in one part
            read = self._passages[part].read(set(ids))
            passages = [read.get(key) or Passage(key, "") for key in ids]  # without text: encoded under "keep"
            columns += [pa.array([getattr(p, name) for p in passages], pa.string()) for name in ("title", "text")]
            columns += self._metadata.arrays(part, part_rows)
        return pa.record_batch([*columns, self._vectors(vectors)], schema=self.schema)

    def _vectors(self, vectors: Any) -> pa.Array:
        lists = vectors if self.encoded_corpus.ragged else Ragged.from_stacked(np.asarray(vectors))
        flat = np.ascontiguousarray(lists.flat, self.dtype).reshape(-1)
        array = pa.FixedSizeListArray.from_arrays(pa.array(flat), self.encoded_corpus.dimension)
        return pa.ListArray.from_arrays(pa.array(lists.offsets, pa.int32()), array) if self.several else array


def vectors_of_batch(batch: pa.RecordBatch) -> list[np.ndarray]:
    """Return the vectors [V,D] of each row of a batch, in the type of the batch."""
    several = "vectors" in batch.schema.names
    column = batch.column("vectors" if several else "vector")
    vectors = column.flatten() if several else column
    flat = vectors.flatten().to_numpy(zero_copy_only=True).reshape(-1, vectors.type.list_size)
    offsets = np.concatenate([[0], np.cumsum(column.value_lengths())]) if several else np.arange(len(flat) + 1)
    return [flat[begin:end] for begin, end in pairwise(offsets.tolist())]
