"""jaxret pretrain: a corpus makes an encoder, or a better one."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxret.data.store import Say
from jaxret.distributed import wait_for_all
from jaxret.pretraining.result import write_model
from jaxret.pretraining.scratch import write_start
from jaxret.pretraining.task import PRETRAINING, build, check_settings
from jaxret.runs.lock import hold
from jaxret.runs.run import open_model
from jaxret.runs.workdir import Workdir
from jaxret.tools.transaction import new_folder
from jaxret.training.check import check
from jaxret.training.loop import TrainResult, train


def pretrain(config: ConfigDict, workdir: str | Path, progress: bool = True, command: str = "") -> TrainResult:
    """Pre-trains the encoder that `config` describes, in `workdir`; goes on if the folder holds the same run. A
    finished run writes `workdir/model`, which `encoder.checkpoint` takes. command: for its card.

    Raises what `jaxret.training.loop.train` raises.
    """
    folder, config = Workdir(workdir), ConfigDict(config.to_dict()).lock()
    say = tqdm.write if progress and jax.process_index() == 0 else lambda _: None
    if not config.encoder.checkpoint:
        config.encoder.checkpoint = str(begin(config, folder, say))
    result = train(config, folder.path, progress, task=PRETRAINING)
    if result.step == result.total_steps:
        finish(folder, command, say)
    return result


def begin(config: ConfigDict, folder: Workdir, say: Say) -> Path:
    """The directory of a BERT that knows nothing, if it is needed: a run with a checkpoint goes on without. Before that
    it is made each time, always the same of the same settings and corpus: a job that failed may have had others."""
    check(config)
    check_settings(config)
    start, there = folder / "start", folder.path.exists()
    if jax.process_index() == 0 and not any(folder.checkpoints.glob("[0-9]*")):
        shutil.rmtree(start, ignore_errors=True)
        try:
            with new_folder(start) as made:
                write_start(config, made, say)
        except BaseException:
            if not there:  # a job that failed at once leaves nothing behind
                with contextlib.suppress(OSError):
                    folder.path.rmdir()
            raise
    wait_for_all()
    return start


def finish(folder: Workdir, command: str, say: Say) -> None:
    """Writes the model of the last checkpoint, in place of that of a shorter run."""
    with hold(folder.path, "writing the model"):
        run = open_model(folder, PRETRAINING.name, build, "last")
        if jax.process_index() == 0:
            shutil.rmtree(folder / "model", ignore_errors=True)
            with new_folder(folder / "model") as made:
                notes = write_model(run, made, command)
            say("\n".join([f"{folder / 'model'}: {notes[0]}", *notes[1:]]))
