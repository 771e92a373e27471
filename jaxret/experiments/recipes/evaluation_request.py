"""The data and measures that evaluate a recipe or a sweep, as a user gives them. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.shared_options import (
    corpus_option,
    k_option,
    match_option,
    measures_option,
    qrels_option,
    queries_option,
    split_option,
)

_TRAIN = "the folder of config.data.train"


@dataclass(frozen=True)
class EvaluationRequest:
    """The data and measures that a user gives; `complete_evaluation` adds the missing sources."""

    corpus: str = corpus_option(_TRAIN)
    queries: str = queries_option(_TRAIN)
    qrels: str = qrels_option("--queries, if it is a folder")
    split: str = split_option("test")
    k: int = k_option()
    measures: tuple[str, ...] | None = measures_option()
    # of the evaluation and of the mining of all stages; "" for strings in the evaluation, and for the setting of each
    # stage in its mining
    match: str = match_option("", "; default: strings, or the setting of a stage's mining")
