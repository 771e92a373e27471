"""The tasks of `jaxret train`, by the value of `config.task`."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxret.training.task import Task
from jaxret.training.tasks.reranking import RERANKING
from jaxret.training.tasks.retrieval import RETRIEVAL

TASKS: dict[str, Task[Any, Any, Any]] = {task.name: task for task in (RETRIEVAL, RERANKING)}


def get_task(config: ConfigDict) -> Task[Any, Any, Any]:
    """Return the task of a config. Raises ValueError for an unknown name."""
    if config.task not in TASKS:
        remedy = ", or use jaxret pretrain" if config.task == "pretraining" else ""
        raise ValueError(f"task is {config.task!r}; it must be one of {', '.join(TASKS)}{remedy}")
    return TASKS[config.task]
