"""Says how different a checkpoint's vectors of a passage are, and which of them win on judged queries:

jaxret diversity --workdir=runs/mlr --data=FOLDER
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "a trained run with several vectors a passage", required=True)
_DATA = flags.DEFINE_string("data", None, "folder with judged queries", required=True)
_SPLIT = flags.DEFINE_string("split", "test", "whose queries")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")


def main() -> None:
    from jaxret.runs.run import open_run
    from jaxret.tools.diversity import report

    print(report(open_run(_WORKDIR.value, _CHECKPOINT.value), _DATA.value, _SPLIT.value))
