"""The stores that vectors are exported to, and their packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORES = {  # --to -> module and class
    "parquet": ("parquet_files", "ParquetFiles"),
    "lancedb": ("lancedb_table", "LanceTable"),
    "pgvector": ("pgvector_table", "PgvectorTable"),
    "qdrant": ("qdrant_collection", "QdrantCollection"),
    "milvus": ("milvus_collection", "MilvusCollection"),
}
_EXTRAS = {"parquet": "data"}  # of the package; where not named, the store's name


def import_client(kind: str, *names: str) -> list[Any]:
    """Import the packages of a store. Raises ValueError with the command that installs them."""
    try:
        return [importlib.import_module(name) for name in names]
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(kind, kind)
        problem = f"--to={kind} needs {error.name}, which is not installed: pip install 'jaxret[{extra}]'"
        raise ValueError(problem) from error


_CLIENTS = ("grpc", "httpx", "psycopg", "pymilvus", "qdrant_client")  # packages whose errors are of the server


@contextmanager
def store_errors(kind: str, address: str) -> Iterator[None]:
    """Raise ValueError for an error of a store's client within the block: the server is not there, or refuses.

    address: of the store, for the message.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise ValueError(f"--to={kind}, {address}: {' '.join(str(error).split())}") from error
