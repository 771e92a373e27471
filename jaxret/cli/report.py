"""Writes a report of runs as one HTML file, which needs no network:

jaxret report runs/dual runs/mlr                            report.html in the current folder
jaxret report dual=runs/a,runs/b mlr=runs/c,runs/d --out=layers.html

It shows configs and their differences, curves, throughput, measures with tests, layers, winning vectors, storage and
latency, queries that are won and lost, and all warnings. The first run is the baseline.
"""

from absl import flags

from jaxret.cli.flags import OptionFlags
from jaxret.experiments.report.report_options import ReportOptions

ARGUMENTS = {"WORKDIR...": "folders of runs; NAME=RUN,RUN is one system"}

_OUT = flags.DEFINE_string("out", "report.html", "HTML file to write")
_OPTIONS = OptionFlags(ReportOptions)


def main(*runs: str) -> None:
    from jaxret.experiments.report.write_report import write_report
    from jaxret.parallel.events import emit

    path = write_report(runs, _OUT.value, _OPTIONS())
    print(f"report: {path}")
    emit("file", kind="report", path=path)
