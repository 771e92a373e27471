"""Options of the evaluation of a search with the queries of a data set."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class EvaluationOptions:
    """The depth of rankings, the measures and the files of an evaluation. Raises ValueError for a value that is not
    allowed."""

    k: int = 100  # passages per query
    # names of measures; None for nDCG@10, RR@10, R@100, Success@5, Success@20 and, if queries have answers,
    # Accuracy@1,5,20,100, with cut-offs of at most k
    measures: tuple[str, ...] | None = None
    name: str = shared_options.result_name()
    label: str = ""  # follows the data set's name in file names, so that results do not replace others
    self_matches: str = shared_options.self_matches()
    latency: int | None = shared_options.latency()
    latency_passages: tuple[int, ...] = ()  # numbers of passages with which a search is timed, too
    dpr_results: bool = option(False, "also write the results in DPR's format, with texts and has_answer")
    match: str = shared_options.match()
    on_error: str = option(
        "error",
        "at a bad record: stop, or skip and count it; keep: allow empty passages, stop at other bad records",
        ("error", "skip", "keep"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1")
