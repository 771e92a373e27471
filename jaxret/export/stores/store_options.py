"""Options of an export to a vector store."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class StoreOptions:
    """Where vectors are written, and how the result is compared. Raises ValueError for values that are not allowed."""

    url: str = option(
        "",
        "address of the store: of a server, or a path; required by --to=pgvector (postgresql://...); default: files "
        "in --out",
    )
    table: str = option("", "new table or collection of the store; default: the name of the encoded corpus")
    texts: bool = option(True, "export titles, texts and metadata to a store; without it, ids and vectors alone")
    k: int = option(10, "passages of each query that are compared with the store's", lower_bound=1)
    sample: int = option(
        64, "stored vectors that are compared as queries, evenly spread, or first --queries", lower_bound=1
    )

    def __post_init__(self) -> None:
        check_options(self)
