"""Evaluate a run with mteb (`jaxret mteb`) on tasks of mteb or on folders, and write mteb's result files."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxret.data.formats import Corpus
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.mteb.mteb_request import MtebRequest
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.parallel.events import emit
from jaxret.runs.run import open_run
from jaxret.storage.atomic import atomic_write
from jaxret.storage.folder_kinds import MTEB, require_folder_kind


def evaluate_by_mteb(request: MtebRequest) -> str:
    """Evaluate a run on tasks, write mteb's results, and return a table of the main scores.

    A task is not repeated if it has a result of this checkpoint on the same data.

    Raises:
        ValueError: mteb is not installed or does not accept the card; no task is given; a task is unknown, is not
            retrieval or has no data on this machine; or two folders have one name.
        FileNotFoundError: the card does not exist.
        FileExistsError: the folder of the results is a folder of another kind.
    """
    if importlib.util.find_spec("mteb") is None:
        raise ValueError("jaxret mteb needs mteb, which is not installed: pip install 'jaxret[mteb]'")
    run, out = open_run(request.workdir, request.checkpoint), Path(request.out)
    require_folder_kind(out, MTEB)
    if not request.tasks:
        raise ValueError("--tasks is empty; give names of mteb's tasks or folders in BEIR's layout, with commas")
    if not request.download:  # libraries read these variables when mteb is imported
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from mteb.cache import ResultCache
    from mteb.results import TaskResult

    from jaxret.experiments.mteb.mteb_searcher import MtebSearcher, model_meta

    meta = model_meta(run, request.model_name or f"jaxret/{run.workdir.name}", request.card)
    searcher, cache = MtebSearcher(run, out, meta), ResultCache(out)
    rows, results = [], []
    for task, corpus in list(_open_tasks(request)):
        name = task.metadata.name
        if corpus and searcher.corpora.setdefault(name, corpus) != corpus:
            raise ValueError(
                f"--tasks has {searcher.corpora[name]} and {corpus}, whose results would have one name; "
                "evaluate one of them with another --out"
            )
        result = cache.load_task_result(name, meta)
        if result is None or result.dataset_revision != task.metadata.revision:
            begin = time.time()
            _load_data(task, request.download)
            scores = {split: task.evaluate(searcher, split, encode_kwargs={}) for split in task.eval_splits}
            result = TaskResult.from_task_results(task, scores, evaluation_time=time.time() - begin)
            cache.save_to_cache(result, meta, encode_kwargs={})
        splits, measure, score = task.eval_splits, task.metadata.main_score, result.get_score()
        rows.append([name, ",".join(splits), measure, f"{score:.5f}"])
        results.append({"task": name, "splits": splits, "measure": measure, "score": score})
    files = cache.get_task_result_path("TASK", meta).parent
    with atomic_write(files / "model_meta.json") as file:  # always, because the card may have changed
        json.dump(meta.to_dict(), file, default=str, indent=4)
    emit("mteb", folder=files, results=results)
    return "\n".join([aligned_table(["task", "split", "measure", "score"], rows, left=3), f"written to {files}"])


def _open_tasks(request: MtebRequest) -> Iterator[tuple[Any, Corpus | None]]:
    """Yield (task, corpus). The corpus is None unless the task is a folder of the user."""
    import mteb

    from jaxret.experiments.mteb.folder_task import folder_task

    for name in request.tasks:
        if Path(name).is_dir():
            corpus = Corpus.open(name)
            yield folder_task(corpus, EvaluationSource.open(name, name, request.split)), corpus
            continue
        try:
            (task,) = mteb.get_tasks(tasks=[name])
        except (KeyError, ValueError) as error:
            raise ValueError(f"--tasks={name} is neither a folder nor a task of mteb: {error}") from error
        if "Retrieval" not in task.metadata.type:
            raise ValueError(f"--tasks={name} has the type {task.metadata.type}; jaxret mteb evaluates only retrieval")
        yield task, None


def _load_data(task: Any, download: bool) -> None:
    try:
        task.load_data()
    except Exception as error:  # datasets, the hub and disks raise different classes
        remedy = "check the network" if download else "--download fetches them"
        name, first = task.metadata.name, str(error).strip().splitlines()[:1]
        raise ValueError(f"the data of {name} are not in the cache of Hugging Face; {remedy} ({first[0]})") from error
