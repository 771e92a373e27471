"""The vector stores to which corpora are exported, and their packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORES = {  # value of --to -> module and class
    "parquet": ("parquet_files", "ParquetFiles"),
    "lancedb": ("lancedb_table", "LanceTable"),
    "pgvector": ("pgvector_table", "PgvectorTable"),
    "qdrant": ("qdrant_collection", "QdrantCollection"),
    "milvus": ("milvus_collection", "MilvusCollection"),
}
_EXTRAS = {"parquet": "data"}  # store -> extra of jaxret, if it has not the name of the store


def import_client(kind: str, *names: str) -> list[Any]:
    """Import packages of a store. Raises ValueError with the command that installs a missing package."""
    try:
        return [importlib.import_module(name) for name in names]
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(kind, kind)
        problem = f"--to={kind} needs {error.name}, which is not installed: pip install 'jaxret[{extra}]'"
        raise ValueError(problem) from error


_CLIENTS = ("grpc", "httpx", "psycopg", "pymilvus", "qdrant_client")  # packages whose errors come from the server


@contextmanager
def store_errors(kind: str, address: str) -> Iterator[None]:
    """Raise ValueError for an error of a store's client in this block: the server cannot be reached, or refuses.
    `address` is the address of the store, for the message."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise ValueError(f"--to={kind}, {address}: {' '.join(str(error).split())}") from error
