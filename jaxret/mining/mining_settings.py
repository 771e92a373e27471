"""Settings of mining: flags of `jaxret mine`, and keys of a recipe's stages."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option

TOP, SAMPLE = "top", "sample"


@dataclass(frozen=True)
class MiningSettings:
    """How negatives are chosen. Ranks count from 1; of several positives, the one with the lowest score counts."""

    depth: int = option(200, "last rank that is considered", lower_bound=1)
    skip: int = option(0, "number of ranks at the top to skip", lower_bound=0)
    keep: int = option(30, "negatives per query from each pool, and from each record of --concat", lower_bound=1)
    draw: str = option(SAMPLE, "draw negatives at random, or take the first ones", (SAMPLE, TOP))
    # The sample depends only on the seed, the query's id and the pool.
    seed: int = option(12345, "seed of the sample", lower_bound=0)
    answers: bool = option(True, "leave out passages with an answer of the query")  # DPR
    match: str = shared_options.match()
    # NV-Retriever's MarginPos and PercPos.
    margin: float | None = option(
        None, "leave out passages with a score of at least the positive's minus this margin", lower_bound=0
    )
    share: float | None = option(
        None, "leave out passages with a score of at least this share of the positive's, such as 0.95"
    )
    # RocketQA: a cross-encoder's .1.
    min_score: float | None = option(None, "leave out passages with a lower score")
    max_score: float | None = option(None, "leave out passages with this score or a higher one")
    # In rank order, without regard to judgements, as in MLR's published code.
    positives_from_retrieval: bool = option(
        False,
        "retrieved passages with an answer are the positives, and the first is the target; judgements are ignored",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise ValueError(f"min_score is {self.min_score} and max_score {self.max_score}: no score is between them")
        if not 0 <= self.skip < self.depth:
            raise ValueError(f"there are no ranks from {self.skip + 1} to {self.depth}; skip must be below depth")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is a part of the positive's score, above 0 and at most 1")
        if self.positives_from_retrieval and not self.answers:
            raise ValueError("positives_from_retrieval needs answer strings; leave answers on")

    @property
    def compares(self) -> bool:
        """Whether a limit depends on the positive's score."""
        return self.margin is not None or self.share is not None

    @property
    def limit(self) -> str:
        """The name of the first limit on scores; "" without one."""
        limits = ("margin", "share", "min_score", "max_score")
        return next((name for name in limits if getattr(self, name) is not None), "")
