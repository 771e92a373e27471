"""Exports a checkpoint to Orbax's files (`jaxret export --to=orbax`). Runs in buckets store other files."""

from __future__ import annotations

from pathlib import Path

from jaxret.runs.run import choose_checkpoint, open_checkpoints, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage.transaction import new_folder


def export_orbax(workdir: str | Path, out: Path, checkpoint: str) -> str:
    """Write parameters and optimizer state of a checkpoint to `out`/STEP, read them back, and return a sentence.

    Args:
        workdir: folder of a run of any kind.
        out: new folder to write.
        checkpoint: "best", "last", or a step.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged, or the files, read back, differ.
    """
    folder = Workdir(workdir)
    with open_checkpoints(folder, stored_config(folder)) as checkpoints:
        step = choose_checkpoint(checkpoints, checkpoint, folder)
        with new_folder(out) as temporary:
            checkpoints.write_orbax(step, temporary)
    return (
        f"{out / str(step)}: parameters and optimizer state of step {step} in Orbax's files; read back, they are equal"
    )
