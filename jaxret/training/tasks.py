"""What can be trained, by the name that `config.task` gives it."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxret.training.reranking import RERANKING
from jaxret.training.retrieving import RETRIEVAL
from jaxret.training.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (RETRIEVAL, RERANKING)}


def task_of(config: ConfigDict) -> Task:
    """Raises ValueError for a name that there is not."""
    if config.task not in TASKS:
        other = "; jaxret pretrain does that" if config.task == "pretraining" else ""
        raise ValueError(f"task is {config.task!r}; it must be one of {', '.join(TASKS)}{other}")
    return TASKS[config.task]
