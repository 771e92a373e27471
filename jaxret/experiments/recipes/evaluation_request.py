"""The data and measures that evaluate a recipe or a sweep, as a user gives them. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options

_TRAIN = "the folder of config.data.train"


@dataclass(frozen=True)
class EvaluationRequest:
    """The data and measures that a user gives; `complete_evaluation` adds the missing sources."""

    corpus: str = shared_options.corpus(_TRAIN)
    queries: str = shared_options.queries(_TRAIN)
    qrels: str = shared_options.qrels("--queries, if it is a folder")
    split: str = shared_options.split("test")
    name: str = shared_options.result_name()
    k: int = shared_options.k()
    measures: tuple[str, ...] | None = shared_options.measures()
    # for the evaluation and the mining of all stages; "": strings in the evaluation, and each stage's own setting in
    # its mining
    match: str = shared_options.match("", "; default: strings, or the setting of a stage's mining")
