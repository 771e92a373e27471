"""Options of an export to a vector store."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class StoreOptions:
    """Options of the table that vectors are written to, and of the comparison. Raises ValueError for invalid values."""

    url: str = option(
        "",
        "address of a server, or path, of the store; required for --to=pgvector (postgresql://...); default: "
        "files in --out",
    )
    table: str = option("", "name of a new table or collection; default: the name of the encoded corpus")
    texts: bool = option(True, "export titles, texts and metadata to a store; --notexts: only ids and vectors")
    k: int = option(10, "passages per query to compare with the results of the store", lower_bound=1)
    sample: int = option(
        64, "queries of the comparison: stored vectors, evenly spread, or the first of --queries", lower_bound=1
    )

    def __post_init__(self) -> None:
        check_options(self)
