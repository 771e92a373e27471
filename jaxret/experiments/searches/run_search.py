"""Open a run, and search a corpus that it encoded for queries of files, for a question, or for typed questions
(`jaxret search`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxret.experiments.searches.answer_question import show_answer
from jaxret.experiments.searches.search_job import SearchJob
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.runs.ray_cluster import ray_workers
from jaxret.runs.run import Run, open_run
from jaxret.search.ray_search import open_searcher
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.process_group import searching


def run_search(
    job: SearchJob, interact: Callable[[Searcher, int], None], settings: Mapping[str, str] | None = None
) -> None:
    """Run a search, and print or write its results. All processes of the job call this; only process 0 prints.

    Args:
        job: the search.
        interact: (searcher, number of passages); answers questions that are typed.
        settings: name -> value that must be equal in all processes.
    """
    job.processes.join()
    has_processes = bool(job.processes.coordinator)
    # With an engine, its workers use the accelerators, and this process does not.
    platform, attention = ("cpu", "plain") if job.engine.engine else (job.platform, job.attention)
    with searching(has_processes, platform, settings or {}):
        run = open_run(job.workdir, job.checkpoint, query_length=job.query_length, attention=attention)
        with ray_workers(job.engine, job.platform, job.attention) as workers:
            options = replace(job.options, all_processes=has_processes, workers=workers)
            if job.queries:
                _search_queries(run, job, options)
            else:
                _answer_questions(run, job, options, interact)


def _search_queries(run: Run, job: SearchJob, options: SearchOptions) -> None:
    # A single question needs no evaluation.
    from jaxret.experiments.searches.search_files import search_files, search_sizes

    step = "" if job.checkpoint == "best" else f"step-{run.checkpoint['step']}"
    evaluation = replace(job.evaluation, label=job.evaluation.label or step)
    if job.sizes:
        search_sizes(run, job.sizes, job.source, evaluation, options, job.encoded_name)
    else:
        search_files(run, job.source, evaluation, options, job.encoded_name)


def _answer_questions(
    run: Run, job: SearchJob, options: SearchOptions, interact: Callable[[Searcher, int], None]
) -> None:
    options = replace(options, dimension=job.sizes[0] if job.sizes else 0)
    searcher = open_searcher(run, corpus_folder(run.workdir, job.encoded_name), options, many=job.interactive)
    k = job.evaluation.k
    if job.query is None:
        interact(searcher, k)
        return
    if searcher.vectors.index:
        print(f"approximate: {searcher.vectors.index.describe(k)}")
    show_answer(searcher, job.query, k)
