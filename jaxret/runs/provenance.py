"""The provenance of a result: the checkpoint, its config and training data, the corpus, and the search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.runs.run import Run
from jaxret.storage.atomic import read_json


def make_provenance(run: Run, corpus_identity: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a number was measured with, as JSON for its file.

    corpus_identity, search: of the corpus that was searched, and how.
    """
    return {
        "checkpoint": run.checkpoint,
        "config": read_json(run.workdir.config),
        "training_data": read_json(run.workdir.data),
        "environment": read_json(run.workdir.environment),
        "corpus": corpus_identity,
        "search": search,
        **({"lineage": read_json(run.workdir.lineage)} if run.workdir.lineage.exists() else {}),
    }
