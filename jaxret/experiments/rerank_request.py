"""The checked request of `jaxret rerank`. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import given_fields

# Fields for reranking and evaluating a run, which have no meaning with `train`.
OF_RUNS = ("queries", "corpus", "qrels", "measures", "self_matches", "k", "tail", "match", "latency")


@dataclass(frozen=True)
class RerankRequest:
    """A cross-encoder, and a run that it reranks or training data that it scores. Raises ValueError for values that are
    missing or exclude each other."""

    out: str  # file to write
    workdir: str = ""  # folder of the run of a cross-encoder; or
    model: str = ""  # folder or hub name of a cross-encoder of transformers
    checkpoint: str = "best"  # with `workdir`: "best", "last" or a step
    download: bool = False  # with `model`: whether files that are not in the local cache are downloaded
    run: str = ""  # file of the run to rerank; or
    train: str = ""  # folder or file with training data
    split: str = ""  # split to read if a source is a folder; "" for "train" with `train`, else "test"
    negatives_run: str = ""  # with `train`: rankings whose passages are the negatives of a folder
    queries: str = ""  # folder or file with the queries of the run
    corpus: str = ""  # folder or file with the passages of the run
    qrels: str = ""  # folder or file with judgements; "" for none
    measures: tuple[str, ...] | None = None  # names such as "nDCG@10"; None for the default measures
    self_matches: str = "auto"  # "auto", "keep" or "remove" passages with the id of their query
    k: int = 100  # number of passages per query that are scored
    tail: bool = True  # whether passages that are not scored follow in the written run
    match: str = "string"  # how answers are read, "string" or "regex"
    latency: int | None = None  # number of queries to time; 0 for none, None for 100 in at most 20 s
    on_error: str = "error"  # "error" or "skip", for bad records
    # query_length, passage_length: largest number of tokens; None: as in training, or as the encoder allows
    query_length: int | None = None
    passage_length: int | None = None
    tokens_per_batch: int | None = None  # None: as in the run
    platform: str = ""  # required platform "gpu", "tpu" or "cpu"; "" for any
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
