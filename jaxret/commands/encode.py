"""Encodes a corpus:

jaxret encode --workdir=runs/mlr --corpus=FOLDER_OR_FILE

Run the same command again to continue an interrupted job. On several hosts with a shared folder run it on each, with
--coordinator: each encodes its own shards, and the last to finish completes the folder.
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_CORPUS = flags.DEFINE_string(
    "corpus", None, "folder or file with passages (docs/data.md has the formats)", required=True
)
_NAME = flags.DEFINE_string("name", "", "name of the encoded corpus; default: that of the folder or file")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")
_PASSAGE_LENGTH = flags.DEFINE_integer("passage_length", None, "tokens of a passage at most; default: as in training")
_DTYPE = flags.DEFINE_string("dtype", "", "of the vectors on disk, float32 or float16; default: the run's encode.dtype")
_SHARD_ROWS = flags.DEFINE_integer(
    "shard_rows", 0, "passages per shard; default: the run's encode.shard_rows, but no more than 8192"
)
_TOKENS_PER_BATCH = flags.DEFINE_integer("tokens_per_batch", None, "default: the run's encode.tokens_per_batch")
_STORE = flags.DEFINE_string(
    "store", "", "folder of token stores; default: the run's data.store, else the user's cache"
)
_COORDINATOR = flags.DEFINE_string("coordinator", "", 'several hosts: "auto" on a TPU pod or under Slurm, or host:port')
_PROCESSES = flags.DEFINE_integer("num_processes", 1, "with --coordinator=host:port: how many processes there are")
_PROCESS = flags.DEFINE_integer("process_id", 0, "with --coordinator=host:port: which of them this is, from 0")
_TIMEOUT = flags.DEFINE_integer("initialization_timeout", 300, "seconds that several processes wait for each other")
_PLATFORM = flags.DEFINE_string(
    "platform", "", "tpu, gpu or cpu: it is an error if there is none; default: what is found"
)
_ATTENTION = flags.DEFINE_string("attention", None, "plain, flash (TPU) or cudnn (GPU); default: as in training")
_ON_ERROR = flags.DEFINE_enum(
    "on_error", "error", ["error", "skip", "keep"], "what to do with bad records (keep: empty passages)"
)


def main() -> None:
    from jaxret import distributed
    from jaxret.memory import keep_freed_memory
    from jaxret.models.encoders.fused import told
    from jaxret.retrieval.encode import encode_corpus
    from jaxret.runs.run import open_run

    keep_freed_memory()
    distributed.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, _TIMEOUT.value)
    distributed.require_platform(_PLATFORM.value, "--platform")
    run = open_run(
        _WORKDIR.value,
        _CHECKPOINT.value,
        passage_length=_PASSAGE_LENGTH.value,
        tokens_per_batch=_TOKENS_PER_BATCH.value,
        attention=_ATTENTION.value,
    )
    print(told(run.config.encoder.attention))
    result = encode_corpus(
        run,
        _CORPUS.value,
        _NAME.value,
        _ON_ERROR.value,
        dtype=_DTYPE.value,
        shard_rows=_SHARD_ROWS.value,
        store=_STORE.value,
    )
    if result.finished:
        print(f"{result.passages:,} passages are in {result.folder}")
    else:  # one of several processes: where there is one, this is an error
        print(f"this process is done; others still write to {result.folder}")
