"""The provenance of a result: checkpoint, config, training data, corpus and search settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.runs.run import Run
from jaxret.storage.atomic import read_json


def make_provenance(run: Run, corpus_identity: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a measured number as JSON.

    `corpus_identity` identifies the corpus that was searched; `search` are the settings of the search.
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
