"""Encodes a corpus: python encode.py --workdir=runs/mlr --corpus=BEIR_FOLDER_OR_FILE

Run the same command again to continue an interrupted job.
"""

from absl import flags

from jaxret.tools.cli import run_script

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_CORPUS = flags.DEFINE_string("corpus", None, "BEIR folder, corpus.jsonl or psgs.tsv (plain or .gz)", required=True)
_NAME = flags.DEFINE_string("name", "", "name of the encoded corpus; default: that of the folder or file")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")
_ON_ERROR = flags.DEFINE_enum("on_error", "error", ["error", "skip"], "what to do with bad records")


def main() -> None:
    from jaxret.models.run import open_run
    from jaxret.retrieval.encode import encode_corpus

    run = open_run(_WORKDIR.value, _CHECKPOINT.value)
    result = encode_corpus(run, _CORPUS.value, _NAME.value, _ON_ERROR.value)
    print(f"{result.passages:,} passages are in {result.folder}")


if __name__ == "__main__":
    run_script(main)
