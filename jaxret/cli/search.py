"""Searches an encoded corpus, exactly unless --index or --candidates is given:

jaxret search --workdir=runs/mlr --queries=FILE --qrels=FILE --k=100     writes a TREC run and its evaluation
jaxret search --workdir=runs/mlr --query="how do I ...?"                 prints the best passages
jaxret search --workdir=runs/mlr --index=IVF4096,PQ64 --query="..."      approximate, with an index of jaxret index
jaxret search --workdir=... --queries=FILE --coordinator=auto            on each host of a job; the hosts share the work
jaxret search --workdir=... --queries=FILE --engine=ray --workers=8 --resources=GPU:1      by a Ray cluster
"""

import gc
import sys

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions
from jaxret.search.search_options import SearchOptions

_WORKDIR = shared_flags.workdir()
_QUERY = flags.DEFINE_string("query", None, "question to answer on the terminal")
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "answer questions from the terminal or standard input, one a line, until an empty line"
)
_QUERIES = shared_flags.queries()
_QRELS = shared_flags.qrels()
_SPLIT = shared_flags.split("test")
_CORPUS = shared_flags.encoded_corpus()
_K = flags.DEFINE_integer("k", None, "passages per query; default: 100 for --queries, else 10", lower_bound=1)
_LATENCY_PASSAGES = flags.DEFINE_list(
    "latency_passages", [], "also time searches of the first N passages, such as 1000,100000, and of all"
)
_DIMENSION = flags.DEFINE_list(
    "dimension", [], "search with the first N dimensions of vectors; several sizes, such as 64,256,all, give a table"
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


def main() -> None:
    if _QUERY.value is not None:  # the process ends after one answer: to collect garbage would take a tenth of its time
        gc.disable()
    from jaxret.experiments.search_job import SearchJob, parse_counts, parse_sizes

    job = SearchJob(
        workdir=_WORKDIR.value,
        query=_QUERY.value,
        interactive=_INTERACTIVE.value,
        queries=_QUERIES.value,
        qrels=_QRELS.value,
        split=_SPLIT.value,
        encoded_name=_CORPUS.value,
        checkpoint=_CHECKPOINT.value,
        query_length=_QUERY_LENGTH.value,
        sizes=parse_sizes(_DIMENSION.value),
        platform=_PLATFORM.value,
        attention=_ATTENTION.value,
        evaluation=_EVALUATION(
            k=_K.value or (100 if _QUERIES.value else 10),
            measures=_MEASURES.value or None,
            latency_passages=parse_counts(_LATENCY_PASSAGES.value),
        ),
        explicit_fields=shared_flags.explicit_names(sys.modules[__name__]),
        options=_OPTIONS(),
        engine=_ENGINE(),
        processes=_JOB(),
    )
    from jaxret.cli.interactive import interact
    from jaxret.experiments.run_search import run_search

    run_search(job, interact, shared_flags.of_job(sys.modules[__name__]))
