"""The checked request of `jaxret rerank`. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from jaxret.configs import shared_options
from jaxret.configs.options import given_fields, option

if TYPE_CHECKING:
    from jaxret.data.formats import Corpus
    from jaxret.data.formats.rankings import RankingSource
    from jaxret.experiments.searches.evaluation_queries import EvaluationSource

# Fields for reranking and evaluating a run, which `train` does not use.
OF_RUNS = ("queries", "corpus", "qrels", "measures", "self_matches", "k", "tail", "match", "latency")


@dataclass(frozen=True, kw_only=True)
class RerankRequest:
    """A cross-encoder, and a run that it reranks or training data that it scores. Raises ValueError for values that are
    missing or exclude each other."""

    workdir: str = option("", "folder of the run of a cross-encoder")
    model: str = option(
        "", "instead of --workdir: folder or hub name of a cross-encoder of transformers, with one label"
    )
    download: bool = shared_options.download()
    out: str  # file to write, a TREC run or training data
    run: str = option("", "rankings to rerank: a TREC run, or another format of docs/data.md")
    queries: str = shared_options.queries()
    corpus: str = shared_options.corpus()
    qrels: str = shared_options.qrels()
    measures: tuple[str, ...] | None = shared_options.measures()
    self_matches: str = shared_options.self_matches()
    match: str = shared_options.match()
    train: str = option("", "instead of --run: training data; all their passages are scored")
    negatives_run: str = option("", "with --train=FOLDER: rankings with its negatives, as data.negatives_run")
    split: str = option("", "split of a folder; default: test, or train with --train")
    k: int = option(100, "passages per query to score", lower_bound=1)
    latency: int | None = shared_options.latency()
    tail: bool = option(
        True, "also write the other passages, after the scored ones; use --notail for a teacher's scores"
    )
    checkpoint: str = shared_options.checkpoint()
    query_length: int | None = shared_options.query_length(", or 128")
    passage_length: int | None = shared_options.passage_length(", or the encoder's limit")
    tokens_per_batch: int | None = shared_options.tokens_per_batch()
    platform: str = shared_options.platform()
    on_error: str = shared_options.on_error()
    explicit_fields: tuple[str, ...] = ()  # fields that the command line sets, default values included

    def __post_init__(self) -> None:
        if bool(self.workdir) == bool(self.model):
            raise ValueError(
                "give either --workdir (the run of a cross-encoder) or --model (one in transformers' files)"
            )
        if bool(self.run) == bool(self.train):
            raise ValueError("give either --run (what to rerank) or --train (what to score)")
        fields = given_fields(self, OF_RUNS, self.explicit_fields)
        if self.train and fields:
            raise ValueError(f"--{fields[0]} needs --run (a run to rerank); with --train all passages are scored")
        if self.run and given_fields(self, ("negatives_run",), self.explicit_fields):
            raise ValueError("--negatives_run needs --train (training data); remove it")
        if self.run and not (self.queries and self.corpus):
            raise ValueError("--run needs --queries and --corpus, the texts of the run")

    @cached_property
    def source(self) -> EvaluationSource:
        """The queries of the run, and judgements for its evaluation. Raises DataError if they are missing."""
        from jaxret.experiments.searches.evaluation_queries import EvaluationSource  # slow: it imports all formats

        return EvaluationSource.open(self.queries, self.qrels, self.split or "test")

    @cached_property
    def texts(self) -> Corpus:
        """The passages of the run. Raises DataError if they are missing."""
        from jaxret.data.formats import Corpus

        return Corpus.open(self.corpus)

    @cached_property
    def rankings(self) -> RankingSource:
        """The run to rerank. Raises DataError if it is missing."""
        from jaxret.data.formats.rankings import RankingSource

        return RankingSource.open(self.run)
