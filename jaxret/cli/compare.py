"""Compares results of `jaxret search` and `jaxret rerank` on the same data: means, deviations over seeds, paired tests:

jaxret compare runs/dual-1 runs/dual-2 runs/mlr-1 runs/mlr-2      runs that differ only in their seeds are one system
jaxret compare dual=runs/a,runs/b mlr=runs/c,runs/d               systems by name
jaxret compare runs/mlr/eval/scifact.test.json runs/mvr/eval/scifact.test.json
jaxret compare runs/dual runs/mlr --data=scifact.test,nfcorpus.test --measures=nDCG@10 --format=latex

The first system is the baseline. Results on different queries, judgements or passages are refused.
"""

import sys

from absl import flags

WRITES = ("report",)
ARGUMENTS = {"RUN...": "folders of runs or result files (runs/NAME/eval/DATA.json); NAME=RUN,RUN is one system"}

_DATA = flags.DEFINE_list(
    "data", [], "data sets to compare: names of results (eval/NAME.json), or all; needed if the folders have several"
)
_MEASURES = flags.DEFINE_list("measures", None, "measures to compare; default: all measures that every result has")
_REPORT = flags.DEFINE_string("report", "", "HTML file of a report of the runs, as from jaxret report")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "markdown", "csv", "latex"], "output format")
_SEED = flags.DEFINE_integer("seed", 0, "seed of the randomization test and of the intervals")
_RESAMPLES = flags.DEFINE_integer("resamples", 100_000, "sign vectors of the randomization test", lower_bound=1000)


def main(*runs: str) -> None:
    from jaxret.experiments.compare_runs import compare_on_sets, emit_comparisons, render_sets
    from jaxret.experiments.report.report_options import ReportOptions
    from jaxret.experiments.report.write_report import run_folders, write_report
    from jaxret.parallel.events import emit

    sets = compare_on_sets(runs, _DATA.value, _MEASURES.value or (), _SEED.value, _RESAMPLES.value)
    print(render_sets(sets, _FORMAT.value))
    emit_comparisons(sets)
    if _REPORT.value:
        options = ReportOptions(tuple(sets), tuple(_MEASURES.value or ()))
        path = write_report(run_folders(runs), _REPORT.value, options, "--report")
        print(f"report: {path}", file=sys.stderr)
        emit("file", kind="report", path=path)
