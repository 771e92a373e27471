"""Train, encode, search and evaluate in one call: what the three scripts do, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxret.evaluation.metrics import Evaluation
from jaxret.retrieval.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.tools.search_files import MEASURES, search_files
from jaxret.training.loop import train

__all__ = ["MEASURES", "run_system"]


def run_system(
    config: ConfigDict, workdir: Path, data: str | Path, split: str, measures: Sequence[str], k: int = 100
) -> Evaluation:
    """Trains `config` in `workdir`, encodes the corpus of the BEIR folder `data` and evaluates on a split of it.

    Continues where it stopped, stage by stage.
    """
    train(config, workdir).require_finished()
    run = open_run(workdir)
    encode_corpus(run, data)
    evaluation = search_files(run, str(data), str(data), split, k, measures)
    assert evaluation is not None  # judgements were given
    return evaluation
