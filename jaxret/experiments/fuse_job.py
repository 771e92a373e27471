"""The request of `jaxret fuse`. Does not import JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from jaxret.configs import shared_options
from jaxret.configs.options import option

if TYPE_CHECKING:
    from jaxret.data.formats.rankings import RankingSource
    from jaxret.experiments.searches.evaluation_queries import EvaluationSource


def parse_weights(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the numbers of --weights. Raises ValueError for a text that is not a number."""
    try:
        return tuple(map(float, texts))
    except ValueError as error:
        raise ValueError(f"--weights={','.join(texts)}: these must be numbers") from error


@dataclass(frozen=True)
class FuseJob:
    """Runs to fuse, and how to evaluate the result."""

    # run files of the same queries, or folders of runs and of BM25, each of which scores every candidate
    runs: Sequence[str]
    out: str  # file to write, a TREC run
    method: str = option(
        "",
        "how scores become comparable: rrf (the default for files), min_max (the default for folders), z_score, or sum "
        "(only for folders)",
        ("rrf", "min_max", "z_score", "sum"),
    )
    weights: tuple[float, ...] = option((), "weight of each run; default: 1 for each", parse=parse_weights)
    encoded_name: str = option(
        "", "with folders: name of the encoded corpus; needed if there are several", flag="corpus"
    )
    k: int = option(1000, "passages per query", lower_bound=1)
    queries: str = shared_options.queries()
    qrels: str = shared_options.qrels()
    split: str = shared_options.split("test")
    measures: tuple[str, ...] = option(("nDCG@10", "RR@10", "R@100"), "measures, named as in ir-measures", parse=tuple)
    tune_runs: tuple[str, ...] = option(
        (),
        "other queries, to choose the weights with the best first measure on them: run files in the same order; with "
        "folders, a folder or file of queries",
        flag="tune",
        parse=tuple,
    )
    tune_qrels: str = option("", "judgements of the queries of --tune")
    tune_split: str = option("dev", "split of --tune_qrels, if it is a folder")
    self_matches: str = shared_options.self_matches()
    explicit_fields: tuple[str, ...] = ()  # fields that the command line sets, default values included

    @cached_property
    def source(self) -> EvaluationSource | None:
        """The queries of the evaluation and their judgements; None without queries. Raises DataError if a source is
        missing."""
        from jaxret.experiments.searches.evaluation_queries import EvaluationSource  # slow: it imports all formats

        return EvaluationSource.open(self.queries, self.qrels, self.split) if self.queries else None

    @cached_property
    def rankings(self) -> tuple[RankingSource, ...]:
        """The run files to fuse. Raises DataError for one that is missing or has no rankings."""
        return _open_rankings(self.runs)

    @cached_property
    def tune_rankings(self) -> tuple[RankingSource, ...]:
        """The run files of the queries of tuning. Raises DataError as `rankings` does."""
        return _open_rankings(self.tune_runs)

    @property
    def removes_self_matches(self) -> bool:
        """Whether passages with the id of their query are left out; "auto" decides by the name of the data set."""
        from jaxret.evaluation.self_matches import removes_self_matches

        return removes_self_matches(self.self_matches, self.source.dataset_name if self.source else "")


def _open_rankings(files: Sequence[str]) -> tuple[RankingSource, ...]:
    from jaxret.data.formats.rankings import RankingSource  # slow: it imports all formats

    return tuple(map(RankingSource.open, files))
