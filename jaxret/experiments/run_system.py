"""Train, encode, search and evaluate in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxret.data.formats import Corpus
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.evaluation_measures import MEASURES
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.experiments.evaluation_queries import EvaluationSource
from jaxret.experiments.search_files import search_files
from jaxret.index.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.training.loop import train

__all__ = ["MEASURES", "run_system"]


def run_system(
    config: ConfigDict, workdir: Path, corpus: Corpus, source: EvaluationSource, measures: Sequence[str]
) -> Evaluation:
    """Train `config` in `workdir`, encode a corpus, and evaluate on queries.

    A second call continues at the step where the first one stopped.

    Args:
        corpus: what is searched.
        source: queries and judgements of it.
        measures: names such as "nDCG@10".
    """
    train(config, workdir).require_finished()
    run = open_run(workdir)
    encode_corpus(run, corpus)
    evaluation = search_files(run, source, EvaluationOptions(measures=tuple(measures)))
    assert evaluation is not None  # judgements were given
    return evaluation
