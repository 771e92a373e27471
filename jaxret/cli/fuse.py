"""Fuses several systems into one, by ranks or scores in run files, or by the scores that all systems compute:

jaxret fuse bm25.trec dense.trec --out=both.trec --queries=FOLDER --qrels=FOLDER
jaxret fuse bm25.trec dense.trec --method=min_max --weights=0.3,0.7 --out=both.trec
jaxret fuse bm25.trec dense.trec --method=min_max --tune=bm25.dev.trec,dense.dev.trec --tune_qrels=FOLDER --out=FILE
jaxret fuse runs/bm25 runs/mlr --weights=0.3,0.7 --queries=FOLDER --qrels=FOLDER --out=both.trec      exact: each system
  scores every candidate, and the result is exact over all passages
jaxret fuse runs/bm25 runs/mlr --tune=FOLDER --tune_qrels=FOLDER --queries=FOLDER --qrels=FOLDER --out=both.trec
"""

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.experiments.fuse_job import FuseJob

ARGUMENTS = {
    "RUN...": "two or more run files of the same queries, in a format of docs/data.md; or folders of runs and BM25"
}

_JOB = OptionFlags(FuseJob, out=shared_flags.out_file("run file to write"))


def main(*runs: str) -> None:
    from jaxret.experiments.fuse_runs import fuse_runs

    fuse_runs(_JOB(runs=runs))
