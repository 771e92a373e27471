"""Options of `jaxret report`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class ReportOptions:
    """The parts of a report. Raises ValueError for a value that is not allowed."""

    data: tuple[str, ...] = option((), "names of results to show (eval/NAME.json); default: all", parse=tuple)
    measures: tuple[str, ...] = option(
        (), "measures to compare; pictures show the first; default: all common measures", parse=tuple
    )
    queries: int = option(5, "number of wins, and of losses, to show with their texts", lower_bound=0)
    title: str = option("", "title of the page; default: the names of the runs")

    def __post_init__(self) -> None:
        check_options(self)
