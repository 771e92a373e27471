"""The teacher of distillation within the batch: another run, whose parameters training reads and does not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxret.models.retriever_model import RetrieverModel, encoder_config, make_retriever_model
from jaxret.parallel.mesh import place_tree
from jaxret.runs.contract import DIMENSION, LENGTHS
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import choose_checkpoint, config_of_task, open_checkpoints, open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.training.task import AnyJob
from jaxret.types import Params

_VECTORS = ("encoder", "head", "pooling", "normalize", DIMENSION)  # parts of a contract in which a teacher may differ
_REMEDY = "train.teacher must name a retriever with the same tokenizer, markers and prompts: it reads the same tokens."


def teacher_model(config: ConfigDict, student: RetrieverModel) -> RetrieverModel | None:
    """Return the model of train.teacher, without parameters and with plain attention; None without a teacher.

    Raises:
        FileNotFoundError: the teacher is not a run.
        ValueError: the teacher is not a retriever, or cannot read the packed rows of the student.
    """
    if not config.train.teacher:
        return None
    folder = Workdir(config.train.teacher)
    stored_config = config_of_task(folder, "retrieval")
    model = make_retriever_model(stored_config, encoder_config(stored_config, folder.encoder)).plain
    heads = student.module.head, model.module.head
    slots = [[head.prefix_length(side) for side in ("query", "passage")] for head in heads]
    if config.tokens.packing and (model.module.head.unattended_tokens() or slots[0] != slots[1]):
        raise ValueError(
            f"tokens.packing is True, but the head of train.teacher={folder} adds other tokens to a text than the head "
            "of this run: set tokens.packing=False"
        )
    return model


def require_teacher(config: ConfigDict, student: RetrieverModel, contract: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError, ValueError or ContractError if train.teacher cannot teach a run. No weights are read."""
    if teacher_model(config, student):
        require_run(config.train.teacher, contract)


def require_run(workdir: str, contract: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError, ValueError or ContractError unless `workdir` has a retriever with a checkpoint, which
    reads the same tokens as a run with this contract."""
    folder = Workdir(workdir)
    with open_checkpoints(folder, config_of_task(folder, "retrieval")) as checkpoints:
        choose_checkpoint(checkpoints, "best", folder)
    require_same_tokens(read_json(folder.contract), contract, str(folder.contract))


def require_same_tokens(teacher: Mapping[str, Any], student: Mapping[str, Any], name: str) -> None:
    """Raise ContractError unless two contracts give a text the same tokens. Their lengths may differ.

    Args:
        teacher: contract of the teacher.
        student: contract of the run that learns from it.
        name: path of the teacher's contract, for the error.
    """
    left_out = (*_VECTORS, *LENGTHS)
    teacher_tokens, student_tokens = (
        {key: value for key, value in contract.items() if key not in left_out} for contract in (teacher, student)
    )
    require_equal(teacher_tokens, student_tokens, name, "this run", _REMEDY)


def load_teacher(job: AnyJob, contract: Mapping[str, Any]) -> tuple[Params | None, dict[str, Any]]:
    """Return the parameters of train.teacher on the mesh, and {"teacher": step and digest of its checkpoint} for
    data.json; None and {} without a teacher.

    Args:
        job: the job of the student.
        contract: contract of the student.

    Raises:
        ContractError: the teacher gives texts other tokens, or this run began with another checkpoint.
        ValueError: the teacher's encoder has too few positions for the student's texts.
    """
    source, tokens = job.config.train.teacher, job.config.tokens
    if not source:
        return None, {}
    teacher = open_run(
        source, query_length=tokens.query_length, passage_length=tokens.passage_length, attention="plain"
    )
    require_same_tokens(teacher.contract, contract, f"{source}/contract.json")
    record = {"teacher": teacher.checkpoint}
    if job.has_begun:
        stored_record = {key: value for key, value in job.data_record.items() if key == "teacher"}
        remedy = "Restore the checkpoint that the run learned from, or choose another --workdir."
        require_equal(stored_record, record, str(job.workdir.data), f"the best checkpoint of {source}", remedy)
    return place_tree(job.mesh, jax.device_get(teacher.params)), record
