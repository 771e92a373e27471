"""The interface of vector stores, to which corpora are exported."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from jaxret.data.records import Ranking
from jaxret.export.stores.store_list import STORES


@dataclass(frozen=True)
class StoreTarget:
    """A table to fill."""

    out: Path  # folder of the export
    url: str  # address of the store; "": the default
    table: str
    schema: pa.Schema  # columns of the rows (`CorpusRows`)
    dtype: str  # type of vectors
    dimension: int  # size of a vector
    ragged: bool  # whether queries have lists of vectors, too (late interaction)

    @property
    def identity(self) -> dict[str, str]:
        """Return the address, without a password, and the table."""
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

    address: str  # address of the table for messages, without a password
    notes: list[str]  # sentences on how the store holds vectors
    query_dtype: str  # type of queries in the store's computations

    def exists(self) -> bool:
        """Return whether a table of this name exists."""
        ...

    def create(self) -> None:
        """Make the empty table, if it does not exist."""

    def keep_first(self, rows: int, entries: Sequence[dict[str, Any]]) -> None:
        """Remove rows from `rows` on, which a killed export left, unless repeated writes replace them. Raises
        ValueError if a finished shard, in `entries` of the journal, was changed."""

    def write(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        """Write the rows of a shard. Return properties of the written shard for the journal, as JSON."""
        ...

    def count(self) -> int:
        """Return the number of passages."""
        ...

    def search(self, queries: Sequence[np.ndarray], k: int) -> Sequence[Ranking]:
        """Return the k best passages of each query by exact search. A query is an array of vectors [U,D] float32."""
        ...

    def close(self) -> None:
        """Release the connection, if there is one."""


def open_vector_store(kind: str, target: StoreTarget) -> VectorStore:
    """Open a store. Raises ValueError for a missing package, an impossible address, or vectors that the store cannot
    hold."""
    module, name = STORES[kind]
    store: VectorStore = getattr(importlib.import_module(f"{__package__}.{module}"), name)(target)
    return store


def without_password(url: str) -> str:
    """Return an address without its user and password, for messages and files."""
    return re.sub(r"([?&](password|token|api_?key)=)[^&]*", r"\1...", re.sub(r"://[^/@]*@", "://", url))
