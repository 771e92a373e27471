"""Encodes a corpus: python encode.py --workdir=runs/mlr --corpus=BEIR_FOLDER_OR_FILE

Run the same command again to continue an interrupted job. On several hosts with a shared folder run it on each, with
--coordinator: each encodes its own shards, and the last to finish completes the folder.
"""

from absl import flags

from jaxret.tools.cli import run_script

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_CORPUS = flags.DEFINE_string("corpus", None, "BEIR folder, corpus.jsonl or psgs.tsv (plain or .gz)", required=True)
_NAME = flags.DEFINE_string("name", "", "name of the encoded corpus; default: that of the folder or file")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")
_COORDINATOR = flags.DEFINE_string("coordinator", "", 'several hosts: "auto" on a TPU pod or under Slurm, or host:port')
_PROCESSES = flags.DEFINE_integer("num_processes", 1, "with --coordinator=host:port: how many processes there are")
_PROCESS = flags.DEFINE_integer("process_id", 0, "with --coordinator=host:port: which of them this is, from 0")
_TIMEOUT = flags.DEFINE_integer("initialization_timeout", 300, "seconds that several processes wait for each other")
_ON_ERROR = flags.DEFINE_enum(
    "on_error", "error", ["error", "skip", "keep"], "what to do with bad records (keep: empty passages)"
)


def main() -> None:
    from jaxret import distributed
    from jaxret.retrieval.encode import encode_corpus
    from jaxret.runs.run import open_run

    distributed.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, _TIMEOUT.value)
    run = open_run(_WORKDIR.value, _CHECKPOINT.value)
    result = encode_corpus(run, _CORPUS.value, _NAME.value, _ON_ERROR.value)
    if result.finished:
        print(f"{result.passages:,} passages are in {result.folder}")
    else:
        print(f"this process is done; others still write to {result.folder}")


if __name__ == "__main__":
    run_script(main)
