"""Options of encoding a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import check_options, option
from jaxret.storage.leases import BOUND


@dataclass(frozen=True)
class EncodeOptions:
    """How passages are read, encoded and written. Raises ValueError for a value that is not allowed."""

    on_error: str = option(
        "error",
        "at a bad record: stop, or skip and count it; keep encodes them as empty passages",
        ("error", "skip", "keep"),
    )
    dtype: str = option(
        "",
        "type of the vectors on disk; default: the run's encode.dtype; of a cut corpus, the type of its source",
        ("", "float32", "float16"),
    )
    dimension: int = option(
        0,
        "numbers of a vector to keep, its first ones, in another corpus, NAME-DIMENSION: cut from vectors that are "
        "stored, else encoded; default: the run's encode.dimension",
        lower_bound=0,
    )
    shard_rows: int = option(
        0,
        "passages per shard at most; default: as the folder's shards have it, else the run's encode.shard_rows, but no "
        "more than 8192 and, on a CPU, about a minute's work",
        lower_bound=0,
    )
    shard_mb: int = option(
        0, "MB (10^6 bytes) of vectors per shard at most; default: the run's encode.shard_mb", lower_bound=0
    )
    words: int = option(
        0,
        "words of a passage to store at most, the heaviest ones, where vectors are weights of words; default: the "
        "run's encode.words",
        lower_bound=0,
    )
    store: str = option("", "folder of token stores; default: the run's data.store, else the user's cache")
    lease: float = option(
        BOUND, "seconds without a sign of life after which other hosts take over the shards of this job", lower_bound=1
    )

    def __post_init__(self) -> None:
        check_options(self)
