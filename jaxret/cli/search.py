"""Searches an encoded corpus, exactly unless --index or --candidates is given:

jaxret search --workdir=runs/mlr --queries=FILE --qrels=FILE --k=100     writes a TREC run and its evaluation
jaxret search --workdir=runs/mlr --query="how do I ...?"                 prints the best passages
jaxret search --workdir=runs/mlr --index=IVF4096,PQ64 --query="..."      approximate, with an index of jaxret index
jaxret search --workdir=... --queries=FILE --coordinator=auto            on each host of a job; the hosts share the work
jaxret search --workdir=... --queries=FILE --engine=ray --workers=8 --resources=GPU:1      by a Ray cluster
"""

import gc
import sys

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.experiments.searches.search_job import SearchJob

_JOB = OptionFlags(SearchJob)


def main() -> None:
    job = _JOB()
    if job.query is not None:  # garbage collection would take a tenth of the time of one answer
        gc.disable()
    from jaxret.cli.interactive import interact
    from jaxret.experiments.searches.run_search import run_search

    run_search(job, interact, shared_flags.of_job(sys.modules[__name__]))
