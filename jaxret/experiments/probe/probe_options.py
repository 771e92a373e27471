"""Options of `jaxret probe`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class ProbeOptions:
    """Numbers of queries and passages of a probe. Raises ValueError for sizes that are too small."""

    split: str = shared_options.split("dev", "split of the judged queries")
    name: str = shared_options.result_name()
    queries: int = option(1000, "judged queries, at most; drawn from the seed", lower_bound=2)
    passages: int = option(
        5000, "passages: all relevant passages of these queries, and others drawn from the seed", lower_bound=2
    )
    corpus_size: int = option(1_000_000, "number of passages for which storage is printed", lower_bound=1)
    seed: int = option(
        0, "seed of all random choices: samples, halves of the queries, significance tests", lower_bound=0
    )

    def __post_init__(self) -> None:
        check_options(self)
