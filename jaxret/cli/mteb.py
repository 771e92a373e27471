"""Evaluates a run with mteb, on retrieval tasks, and writes mteb's files of results:

jaxret mteb --workdir=runs/mlr --tasks=SciFact,NFCorpus --out=results --download
jaxret mteb --workdir=runs/mlr --tasks=beir/scifact --out=results        a folder in BEIR's layout

Passages are encoded into the run's folder and searched exactly. Needs `pip install 'jaxret[mteb]'`.
"""

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.experiments.mteb.mteb_request import MtebRequest

_REQUEST = OptionFlags(MtebRequest, out=shared_flags.out_folder("folder of the results"))


def main() -> None:
    request = _REQUEST()
    from jaxret.experiments.mteb.run_mteb import evaluate_by_mteb

    print(evaluate_by_mteb(request))
