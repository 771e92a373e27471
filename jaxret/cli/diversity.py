"""Measures how different the vectors of a passage are, and how often each of them has the best score:

jaxret diversity --workdir=runs/mlr --data=FOLDER_OR_FILE
"""

from absl import flags

from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

_WORKDIR = define_flag(shared_options.workdir("folder of a run with several vectors per passage"))
_DATA = flags.DEFINE_string(
    "data", None, "folder with judged queries and a corpus, or file of training records", required=True
)
_SPLIT = define_flag(shared_options.split("test"))
_CHECKPOINT = define_flag(shared_options.checkpoint())
_NAME = define_flag(shared_options.result_name())


def main() -> None:
    from jaxret.experiments.vector_diversity import JudgedSource, report_diversity
    from jaxret.runs.run import open_run

    data = JudgedSource.open(_DATA.value, _SPLIT.value)
    print(report_diversity(open_run(_WORKDIR.value, _CHECKPOINT.value), data, _NAME.value))
