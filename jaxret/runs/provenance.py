"""The provenance of a result: checkpoint, config, training data, corpus and search settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.runs.run import OpenedRun, Run
from jaxret.storage.atomic import read_json


def model_origin(run: OpenedRun[Any]) -> dict[str, Any]:
    """Return the origin of a run's model as JSON: its checkpoint, and the records in the folder of the run."""
    folder = run.workdir
    files = {"config": folder.config, "training_data": folder.data, "environment": folder.environment}
    files |= {"lineage": folder.lineage} if folder.lineage.exists() else {}
    return {"checkpoint": run.checkpoint, **{name: read_json(path) for name, path in files.items()}}


def make_provenance(run: Run, corpus_identity: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a measured number as JSON.

    `corpus_identity` identifies the corpus that was searched; `search` are the settings of the search.
    """
    return {**model_origin(run), "corpus": corpus_identity, "search": search}
