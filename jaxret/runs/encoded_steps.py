"""The checkpoints that encoded the vectors in a run's folder. Training keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_with_digest
from jaxret.storage.buckets.working_copy import refresh

ANNOUNCEMENT_FILE = "begun.json"


def announcement_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder of vectors that may record the fingerprint of its shards."""
    yield from (folder / ANNOUNCEMENT_FILE, folder / "manifest.json")
    yield from sorted(folder.glob("shard-*.json"))


def encoded_steps(workdir: Workdir) -> set[int]:
    """Return the steps of the checkpoints that encoded the vectors of a run, also of a corpus whose encoding has only
    begun."""
    refresh(workdir.path)  # other jobs encode during training
    steps = (_encoded_step(folder) for folder in workdir.path.glob("embeddings/*"))
    return {step for step in steps if step is not None}


def _encoded_step(folder: Path) -> int | None:
    """Return the step of the checkpoint of a folder's vectors, which all its files share; None if no file has it."""
    for path in announcement_files(folder):
        try:
            step = read_with_digest(path)["fingerprint"]["checkpoint"]["step"]
        except (OSError, ValueError, KeyError, TypeError):  # missing, damaged, or vectors of unknown origin
            continue
        if type(step) is int:
            return step
    return None
