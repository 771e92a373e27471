"""Options of `jaxret plot`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class PictureOptions:
    """Options that only some kinds of pictures read. Raises ValueError for a value of another type."""

    measures: tuple[str, ...] = option(
        (), "sweep: the measure; domains: one measure for both axes, or one for each", parse=tuple
    )
    x: tuple[str, ...] = option(
        (), "domains: results in the domain of training (eval/NAME.json); of several results, their mean", parse=tuple
    )
    y: tuple[str, ...] = option((), "domains: results of other domains", parse=tuple)
    data: str = option("", "winners, weights: the report (eval/NAME.diversity.json), if a run has several")
    passage: str = option("", "words: text of the passage")
    title: str = option("", "words: title of the passage")
    checkpoint: str = shared_options.checkpoint()

    def __post_init__(self) -> None:
        check_options(self)
