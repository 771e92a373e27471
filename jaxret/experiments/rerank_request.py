"""The work of a cross-encoder as one value, which is checked before JAX is imported: `jaxret rerank`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import given_fields

# Fields that say how a run is reranked and evaluated.
OF_RUNS = ("queries", "corpus", "qrels", "measures", "self_matches", "k", "tail", "match", "latency")


@dataclass(frozen=True)
class RerankRequest:
    """A cross-encoder, and a run that it reranks or training data that it scores. Raises ValueError for values that are
    missing or exclude each other."""

    out: str  # file to write
    workdir: str = ""  # folder of the run of a cross-encoder; or
    model: str = ""  # folder or hub name of a cross-encoder of transformers
    checkpoint: str = "best"  # with `workdir`: "best", "last" or a step
    download: bool = False  # with `model`: download what is not in the local cache
    run: str = ""  # file of the run to rerank; or
    train: str = ""  # folder or file with training data
    split: str = ""  # to read, where a source is a folder; "": test, with `train` train
    negatives_run: str = ""  # with `train`: rankings whose passages are the negatives of a folder
    # The rest of these is as in `RerankJob`; `k` is its depth.
    queries: str = ""
    corpus: str = ""
    qrels: str = ""
    measures: tuple[str, ...] | None = None
    self_matches: str = "auto"
    k: int = 100
    tail: bool = True
    match: str = "string"
    latency: int | None = None
    on_error: str = "error"
    # query_length, passage_length: most tokens; None: as in training, or as the encoder allows
    query_length: int | None = None
    passage_length: int | None = None
    tokens_per_batch: int | None = None  # None: of the run
    platform: str = ""  # "gpu", "tpu" or "cpu" that is required; "" for any
    explicit_fields: tuple[str, ...] = ()  # those on the command line, also with the default value

    def __post_init__(self) -> None:
        if bool(self.workdir) == bool(self.model):
            raise ValueError(
                "give either --workdir (the run of a cross-encoder) or --model (one in transformers' files)"
            )
        if bool(self.run) == bool(self.train):
            raise ValueError("give either --run (what to rerank) or --train (what to score)")
        of_runs = given_fields(self, OF_RUNS, self.explicit_fields)
        if self.train and of_runs:
            raise ValueError(f"--{of_runs[0]} needs --run (a run to rerank); with --train all passages are scored")
        if self.run and given_fields(self, ("negatives_run",), self.explicit_fields):
            raise ValueError("--negatives_run needs --train (training data); leave it out")
        if self.run and not (self.queries and self.corpus):
            raise ValueError("--run needs --queries and --corpus, the texts of the run")
