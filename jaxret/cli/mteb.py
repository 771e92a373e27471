"""Evaluates a run with mteb, on retrieval tasks, and writes mteb's files of results:

jaxret mteb --workdir=runs/mlr --tasks=SciFact,NFCorpus --out=results --download
jaxret mteb --workdir=runs/mlr --tasks=beir/scifact --out=results        a folder in BEIR's layout

Passages are encoded into the run's folder and searched exactly. Needs `pip install 'jaxret[mteb]'`.
"""

from dataclasses import replace
from pathlib import Path

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.experiments.mteb.mteb_options import MtebOptions

_WORKDIR = define_flag(shared_options.workdir("folder of the run"))
_TASKS = flags.DEFINE_list("tasks", None, "names of mteb's tasks, or folders in BEIR's layout", required=True)
_OUT = shared_flags.out_folder("folder of the results")
_OPTIONS = OptionFlags(MtebOptions)
_CHECKPOINT = define_flag(shared_options.checkpoint())


def main() -> None:
    from jaxret.experiments.mteb.run_mteb import evaluate_by_mteb, require_mteb
    from jaxret.runs.run import open_run

    require_mteb()
    run = open_run(_WORKDIR.value, _CHECKPOINT.value)
    print(evaluate_by_mteb(run, Path(_OUT.value), replace(_OPTIONS(), tasks=tuple(_TASKS.value))))
