"""Evaluates a run on every data set of a folder, and prints a table with the means that papers report for BEIR:

jaxret beir DATA --workdir=runs/mlr --passage_length=256 --query_length=256
jaxret beir DATA --workdir=runs/mlr --bm25 --beside=runs/dual      also BM25 and another run

DATA has a folder for each set, with corpus.jsonl, queries.jsonl and qrels/; a folder of such folders (CQADupStack) is
one set, whose result is the mean. Run the same command again to continue: finished sets are skipped.
"""

from absl import flags

from jaxret.cli import shared_flags

ARGUMENTS = {"DATA": "folder with a folder for each data set"}

_WORKDIR = shared_flags.workdir()
_CHECKPOINT = shared_flags.checkpoint()
_QUERY_LENGTH = shared_flags.query_length()
_PASSAGE_LENGTH = shared_flags.passage_length()
_PLATFORM = shared_flags.platform()
_SETS = flags.DEFINE_list("sets", [], "sets to evaluate on; default: all sets of the folder")
_SPLIT = shared_flags.split("test", "split of the judgements")
_ON_ERROR = shared_flags.on_error(keep=True)
_BM25 = flags.DEFINE_bool("bm25", False, "also evaluate BM25 on the sets, and show it in another column")
_BESIDE = flags.DEFINE_multi_string(
    "beside",
    [],
    "system to show in another column: folder of a run, or of evaluations SET.SPLIT.json; NAME=FOLDER names it",
)


def main(data: str) -> None:
    from jaxret.experiments.beir import BeirJob, evaluate_beir
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.processes import require_platform

    keep_freed_memory()
    require_platform(_PLATFORM.value, "--platform")
    evaluate_beir(
        BeirJob(
            workdir=_WORKDIR.value,
            folder=data,
            checkpoint=_CHECKPOINT.value,
            query_length=_QUERY_LENGTH.value,
            passage_length=_PASSAGE_LENGTH.value,
            bm25=_BM25.value,
            columns=tuple(_BESIDE.value),
            sets=tuple(_SETS.value),
            split=_SPLIT.value,
            on_error=_ON_ERROR.value,
        )
    )
