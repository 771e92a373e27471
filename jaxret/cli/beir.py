"""Evaluates a run on every data set of a folder, and prints a table with the means that papers report for BEIR:

jaxret beir DATA --workdir=runs/mlr --passage_length=256 --query_length=256
jaxret beir DATA --workdir=runs/mlr --bm25 --beside=runs/dual      also BM25 and another run

DATA has a folder for each set, with corpus.jsonl, queries.jsonl and qrels/; a folder of such folders (CQADupStack) is
one set, whose result is the mean. Run the same command again to continue: finished sets are skipped.
"""

from jaxret.cli.flags import OptionFlags
from jaxret.experiments.beir_job import BeirJob

ARGUMENTS = {"DATA": "folder with a folder for each data set"}

_JOB = OptionFlags(BeirJob)


def main(data: str) -> None:
    job = _JOB(folder=data)
    from jaxret.experiments.run_beir import evaluate_beir
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.processes import require_platform

    keep_freed_memory()
    require_platform(job.platform, "--platform")
    evaluate_beir(job)
