"""Options of encoding a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option
from jaxret.storage.leases import BOUND


@dataclass(frozen=True)
class EncodeOptions:
    """How passages are read, encoded and written. Raises ValueError for a value that is not allowed."""

    on_error: str = shared_options.on_error(keep=True)
    dtype: str = option(
        "",
        "type of the vectors on disk; default: the run's encode.dtype, or for a cut corpus the type of its source",
        ("", "float32", "float16"),
    )
    dimension: int = option(
        0,
        "keep the first N dimensions of a vector, in another corpus, NAME-N: stored vectors are cut, otherwise "
        "passages are encoded; default: the run's encode.dimension",
        lower_bound=0,
    )
    shard_rows: int = option(
        0,
        "passages per shard, at most; default: as in shards of the folder, else the run's encode.shard_rows, "
        "but at most 8192 and about a minute's work",
        lower_bound=0,
    )
    shard_mb: int = option(
        0, "MB (10^6 bytes) of vectors per shard, at most; default: the run's encode.shard_mb", lower_bound=0
    )
    words: int | None = option(
        None,
        "for sparse vectors: words of a passage to store, those with the largest weights; 0: all; "
        "default: the run's encode.words",
        lower_bound=0,
    )
    store: str = option("", "folder of token stores; default: the run's data.store, else the user's cache")
    lease: float = option(
        BOUND, "seconds after which hosts take over the shards of a job that does not renew its leases", lower_bound=1
    )

    def __post_init__(self) -> None:
        check_options(self)
