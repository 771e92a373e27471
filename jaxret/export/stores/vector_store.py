"""Interface of a store that vectors are exported to, and the stores there are."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from jaxret.export.stores.store_list import STORES

Hits = list[tuple[str, float]]  # (passage id, score), best first


@dataclass(frozen=True)
class StoreTarget:
    """A table to fill.

    out: folder of the export; url: address of the store, "" for the default; schema: of the rows (`CorpusRows`);
    dtype and dimension: of vectors; ragged: whether a query has a list of vectors, too (late interaction).
    """

    out: Path
    url: str
    table: str
    schema: pa.Schema
    dtype: str
    dimension: int
    ragged: bool

    @property
    def identity(self) -> dict[str, str]:
        """Return address and table, without a password."""
        return {"url": without_password(self.url), "table": self.table}

    @property
    def several(self) -> bool:
        """Whether a passage may have several vectors."""
        return "vectors" in self.schema.names

    @property
    def vector_column(self) -> str:
        return "vectors" if self.several else "vector"


@runtime_checkable
class VectorStore(Protocol):
    """A table of a store. Opening it raises ValueError for vectors that the store cannot hold."""

    place: str  # of the table, for messages, without a password
    notes: list[str]  # sentences on how the store holds the vectors
    query_dtype: str  # in which the store computes with queries

    def exists(self) -> bool:
        """Return whether there is a table of that name."""
        ...

    def create(self) -> None:
        """Make the empty table, if it does not exist."""
        ...

    def keep_first(self, rows: int, entries: Sequence[dict[str, Any]]) -> None:
        """Remove, or be ready to replace, what a killed export left from row `rows` on; `entries` are those of the
        finished shards before. Raises ValueError if one of these is no longer as it was written."""
        ...

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        """Write the rows of a shard; return what the journal notes of it beside their number, as JSON."""
        ...

    def count(self) -> int:
        """Return the number of passages."""
        ...

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[Hits]:
        """Return the k best passages of each query, a list of vectors [U,D] float32, without an approximate index."""
        ...

    def close(self) -> None: ...


def open_vector_store(kind: str, target: StoreTarget) -> VectorStore:
    """Open a store. Raises ValueError for a package that is missing, an address it cannot have, or vectors that it
    cannot hold."""
    module, name = STORES[kind]
    store: VectorStore = getattr(importlib.import_module(f"{__package__}.{module}"), name)(target)
    return store


def without_password(url: str) -> str:
    """Return an address without its user and password, for messages and files."""
    return re.sub(r"([?&](password|token|api_?key)=)[^&]*", r"\1...", re.sub(r"://[^/@]*@", "://", url))
