"""Train, encode, search and evaluate in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxret.data.formats import Corpus
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.searches.evaluation_measures import MEASURES
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.training.loop import train

__all__ = ["MEASURES", "run_system"]


def run_system(
    config: ConfigDict, workdir: Path, corpus: Corpus, source: EvaluationSource, measures: Sequence[str]
) -> Evaluation:
    """Train a run, encode a corpus with it, and return its evaluation on queries.

    If a call is interrupted, the next call continues its work.

    Args:
        config: config of the run.
        workdir: folder of the run.
        corpus: the corpus to search.
        source: queries, and judgements of passages of this corpus.
        measures: names such as "nDCG@10".
    """
    train(config, workdir).require_finished()
    run = open_run(workdir)
    encode_corpus(run, corpus)
    evaluation = search_files(run, source, EvaluationOptions(measures=tuple(measures)))
    assert evaluation is not None  # `search_files` returns None only without judgements
    return evaluation
