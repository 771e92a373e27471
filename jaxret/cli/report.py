"""Writes a report of runs as one HTML file, which needs no network:

jaxret report runs/dual runs/mlr                            report.html in the current folder
jaxret report dual=runs/a,runs/b mlr=runs/c,runs/d --out=layers.html

It shows configs and their differences, curves, throughput, measures with tests, layers, winning vectors, storage and
latency, queries that are won and lost, and all warnings. The first run is the baseline.
"""

from absl import flags

ARGUMENTS = {"WORKDIR...": "folders of runs; NAME=RUN,RUN is one system"}

_OUT = flags.DEFINE_string("out", "report.html", "HTML file to write")
_DATA = flags.DEFINE_list("data", [], "names of results to show (eval/NAME.json); default: all")
_MEASURES = flags.DEFINE_list(
    "measures", [], "measures to compare; pictures show the first; default: all common measures"
)
_QUERIES = flags.DEFINE_integer("queries", 5, "number of wins, and of losses, to show with their texts", lower_bound=0)
_TITLE = flags.DEFINE_string("title", "", "title of the page; default: the names of the runs")


def main(*runs: str) -> None:
    from jaxret.experiments.report.write_report import ReportOptions, write_report
    from jaxret.parallel.events import emit

    options = ReportOptions(tuple(_DATA.value), tuple(_MEASURES.value), _QUERIES.value, _TITLE.value)
    path = write_report(runs, _OUT.value, options)
    print(f"report: {path}")
    emit("file", kind="report", path=path)
