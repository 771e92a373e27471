"""Pre-train an encoder on a corpus, from pre-trained or from random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxret.parallel.processes import wait_for_all
from jaxret.parallel.progress import print_line
from jaxret.runs.lock import hold_folder
from jaxret.runs.run import open_model
from jaxret.runs.workdir import Workdir
from jaxret.storage.buckets.working_copy import publish, refresh
from jaxret.storage.folder_kinds import RUN, require_folder_kind
from jaxret.storage.transaction import new_folder
from jaxret.training.config_check import check_config
from jaxret.training.loop import TrainResult, train
from jaxret.training.pretraining.pretraining_task import PRETRAINING, check_pretraining_config, make_pretrainer
from jaxret.training.pretraining.scratch import write_random_encoder
from jaxret.training.pretraining.write_encoder import write_pretrained_encoder


def pretrain(config: ConfigDict, workdir: str | Path, command: str = "") -> TrainResult:
    """Pre-train the encoder that a config describes, in `workdir`; resume if the folder has this run already. A
    finished run writes `workdir/model`, which can be the value of `encoder.checkpoint`.

    Args:
        config: the config of the run.
        workdir: folder of the run; it is made if it does not exist.
        command: the command line, for the model card.

    Raises:
        ContractError: the folder has another run.
        DataError: a record is bad.
        CheckpointError: a checkpoint is damaged or could not be saved.
        NotFiniteError: the loss or a parameter is not finite.
        LockedError: another job writes to the folder.
    """
    folder, config = Workdir(workdir), ConfigDict(config.to_dict()).lock()
    check_pretraining_config(config)
    check_config(config)
    require_folder_kind(folder.path, RUN)
    with hold_folder(folder.path, "pre-training"):
        if not config.encoder.checkpoint:
            config.encoder.checkpoint = str(write_scratch_encoder(config, folder))
        result = train(config, folder.path, task=PRETRAINING, is_held=True)
        if result.step == result.total_steps:
            write_final_encoder(folder, command)
    return result


def write_scratch_encoder(config: ConfigDict, folder: Workdir) -> Path:
    """Write a BERT with random weights, unless the run has a checkpoint, and return its directory.

    The caller holds the folder's lock. Files of an earlier job are replaced, because it may have had other settings;
    the same settings and corpus give the same files.
    """
    start = folder / "start"
    if jax.process_index() == 0 and not any(folder.checkpoints.glob("[0-9]*")):
        shutil.rmtree(start, ignore_errors=True)
        with new_folder(start) as temporary:
            write_random_encoder(config, temporary)
        publish(folder)
    wait_for_all()
    if jax.process_index() > 0:
        refresh(folder)
    return start


def write_final_encoder(folder: Workdir, command: str) -> None:
    """Write the model of the last checkpoint, and replace a model that is in the folder. The caller holds the folder's
    lock."""
    run = open_model(folder, PRETRAINING.name, make_pretrainer, "last")
    if jax.process_index() == 0:
        shutil.rmtree(folder / "model", ignore_errors=True)
        with new_folder(folder / "model") as temporary:
            notes = write_pretrained_encoder(run, temporary, command)
        print_line("\n".join([f"{folder / 'model'}: {notes[0]}", *notes[1:]]))
