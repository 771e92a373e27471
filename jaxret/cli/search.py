"""Searches an encoded corpus, exactly unless --index or --candidates is given:

jaxret search --workdir=runs/mlr --queries=FILE --qrels=FILE --k=100     writes a TREC run and its evaluation
jaxret search --workdir=runs/mlr --query="how do I ...?"                 prints the best passages
jaxret search --workdir=runs/mlr --index=IVF4096,PQ64 --query="..."      approximately, by an index of jaxret index
jaxret search --workdir=... --queries=FILE --coordinator=auto            on each host of a job, which share the work
jaxret search --workdir=... --queries=FILE --engine=ray --workers=8 --resources=GPU:1      by a Ray cluster
"""

import gc
import sys
from dataclasses import replace

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions, ray_workers
from jaxret.search.search_options import SearchOptions

_WORKDIR = shared_flags.workdir()
_QUERY = flags.DEFINE_string("query", None, "a question to answer here and now")
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "answer questions of the terminal or of standard input, one a line, until an empty line"
)
_QUERIES = shared_flags.queries()
_QRELS = shared_flags.qrels()
_CORPUS = shared_flags.encoded_corpus()
_K = flags.DEFINE_integer("k", None, "passages per query; default: 100 for --queries, else 10", lower_bound=1)
_LATENCY_PASSAGES = flags.DEFINE_list(
    "latency_passages", [], "time searches of the first N passages too, as of 1000,100000; and of all"
)
_DIMENSION = flags.DEFINE_list(
    "dimension", [], "search by the first N numbers of each vector; several sizes, as 64,256,all, become a table"
)
_CHECKPOINT = shared_flags.checkpoint()
_QUERY_LENGTH = shared_flags.query_length()
_MEASURES = shared_flags.measures()
_PLATFORM = shared_flags.platform()
_ATTENTION = shared_flags.attention()
_JOB = OptionFlags(JobOptions)
_ENGINE = OptionFlags(EngineOptions)
_OPTIONS = OptionFlags(SearchOptions)
_EVALUATION = OptionFlags(EvaluationOptions)


def _counts(values: list[str]) -> tuple[int, ...]:
    if wrong := [value for value in values if not value.isdecimal()]:
        raise ValueError(f"--latency_passages={','.join(values)}: {wrong[0]!r} is not a number of passages")
    return tuple(map(int, values))


def main() -> None:
    if _QUERY.value is not None:  # the process ends after one answer: to collect garbage would take a tenth of its time
        gc.disable()
    from jaxret.cli.interactive import interact
    from jaxret.data.record_checks import check_question
    from jaxret.experiments.evaluation_queries import has_queries_of_every_split
    from jaxret.experiments.search_files import search_files, show_answer
    from jaxret.experiments.search_sizes import parse_sizes, search_sizes
    from jaxret.index.corpus_folder import corpus_folder
    from jaxret.runs.run import open_run
    from jaxret.search.process_group import searching
    from jaxret.search.ray_search import open_searcher

    engine, together = _ENGINE(), bool(_JOB().coordinator)
    if engine.engine and together:
        raise ValueError("--engine and --coordinator are two ways to search by several processes: leave one out")
    several = "--engine" if engine.engine else "--coordinator" if together else ""
    options = replace(_OPTIONS(), all_processes=bool(several))  # of an engine too, so that options are checked now
    evaluation, sizes = _EVALUATION(), parse_sizes(_DIMENSION.value)
    if [_QUERY.value is not None, bool(_QUERIES.value), _INTERACTIVE.value].count(True) != 1:
        raise ValueError("give either --query (a question), --queries (a file) or --interactive")
    if _QUERY.value is not None:
        check_question(_QUERY.value)
    without_qrels = flags.FLAGS["split"].present and _QUERIES.value and not _QRELS.value
    if without_qrels and has_queries_of_every_split(_QUERIES.value, evaluation.split):
        raise ValueError(
            f"--split={evaluation.split} chooses nothing: {_QUERIES.value} has the queries of every split in one file, "
            f"and judgements say which are of one; give --qrels={_QUERIES.value} too"
        )
    if len(sizes) > 1 and not _QUERIES.value:
        raise ValueError(f"--dimension={','.join(_DIMENSION.value)}: several sizes are for --queries; give one")
    if several:
        if _INTERACTIVE.value:
            raise ValueError(f"--interactive answers in one process: leave {several} out")
        if evaluation.latency or _LATENCY_PASSAGES.value:
            raise ValueError(f"--latency and --latency_passages time one process: leave them, or {several}, out")
    _JOB().join()
    # The workers of an engine have the accelerators.
    platform, attention = ("cpu", "plain") if engine.engine else (_PLATFORM.value, _ATTENTION.value)
    with searching(together, platform, shared_flags.of_job(sys.modules[__name__])):
        run = open_run(_WORKDIR.value, _CHECKPOINT.value, query_length=_QUERY_LENGTH.value, attention=attention)
        with ray_workers(engine, _PLATFORM.value, _ATTENTION.value) as workers:
            options = replace(options, all_processes=together, workers=workers)
            if _QUERIES.value:
                evaluation = replace(
                    evaluation,
                    k=_K.value or evaluation.k,
                    latency_passages=_counts(_LATENCY_PASSAGES.value),
                    measures=tuple(_MEASURES.value) if _MEASURES.value else None,
                    label="" if _CHECKPOINT.value == "best" else f"step-{run.checkpoint['step']}",
                )
                if sizes:
                    search_sizes(run, sizes, _QUERIES.value, _QRELS.value, evaluation, options, _CORPUS.value)
                else:
                    search_files(run, _QUERIES.value, _QRELS.value, evaluation, options, _CORPUS.value)
                return
            options = replace(options, dimension=sizes[0] if sizes else 0)
            searcher = open_searcher(run, corpus_folder(run.workdir, _CORPUS.value), options, many=_INTERACTIVE.value)
            if _INTERACTIVE.value:
                interact(searcher, _K.value or 10)
                return
            if searcher.index:
                print(f"approximate: {searcher.index.describe(_K.value or 10)}")
            show_answer(searcher, _QUERY.value or "", _K.value or 10)
