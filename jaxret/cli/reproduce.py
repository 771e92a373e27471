"""Lists the rows of the papers' tables, prints the commands of a row, or runs it and compares with the paper's numbers:

jaxret reproduce                                               every table, and how many of its rows can be run
jaxret reproduce mlr/2                                         the rows of a table, with the paper's numbers
jaxret reproduce mlr/2/mlr-10-12 --data=DATA                   the commands of a row, and the files that they need
jaxret reproduce mlr/2/mlr-10-12 --data=DATA --run --on=nq     runs them; the same command resumes
jaxret reproduce mlr/2/mlr-10-12 --data=DATA --run --scale=0.01 --set=train.batch_size=8

DATA holds a folder for each data set. Nothing is downloaded.
"""

from absl import flags

ARGUMENTS = {"[ROW]": "PAPER, PAPER/TABLE or PAPER/TABLE/ROW, such as mlr/2/dual-encoder"}

_DATA = flags.DEFINE_string("data", "data", "folder with a folder for each data set")
_WORKDIR = flags.DEFINE_string("workdir", "runs/reproduce", "folder of the runs")
_RUN = flags.DEFINE_boolean("run", False, "run the commands of the row")
_ON = flags.DEFINE_string("on", "", "with --run: only this data set of the row")
_SCALE = flags.DEFINE_float("scale", 1.0, "with --run: fraction of the paper's training, for a trial", lower_bound=0.0)
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE: another value of a key of the config")


def main(pattern: str = "") -> None:
    from jaxret.experiments.reproduce.listing import list_rows

    list_rows(pattern, _DATA.value, _WORKDIR.value, _SET.value, _ON.value if _RUN.value else None, _SCALE.value)
