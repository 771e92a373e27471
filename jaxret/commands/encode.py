"""Encodes a corpus:

jaxret encode --workdir=runs/mlr --corpus=FOLDER_OR_FILE
jaxret encode --workdir=runs/mlr --corpus=MORE --append     adds passages to the encoded corpus (--name says which)
jaxret encode --workdir=runs/mlr --delete=IDS.txt           takes passages out of it, by id

Run the same command again to continue an interrupted job, and as often as you like at the same time, on any hosts that
share the run's folder: each job takes shards that no other has, those of jobs that died too, and ends when all are
there.
"""

from typing import Any

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_CORPUS = flags.DEFINE_string("corpus", "", "folder or file with passages (docs/data.md has the formats)")
_NAME = flags.DEFINE_string("name", "", "name of the encoded corpus; default: that of the folder or file")
_APPEND = flags.DEFINE_bool("append", False, "add the passages to the corpus that is encoded as --name")
_DELETE = flags.DEFINE_string("delete", "", "file with ids, one a line: delete these passages from the corpus --name")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")
_PASSAGE_LENGTH = flags.DEFINE_integer("passage_length", None, "tokens of a passage at most; default: as in training")
_DTYPE = flags.DEFINE_string("dtype", "", "of the vectors on disk, float32 or float16; default: the run's encode.dtype")
_SHARD_ROWS = flags.DEFINE_integer(
    "shard_rows",
    0,
    "passages per shard; default: the run's encode.shard_rows, but no more than 8192",
    lower_bound=0,
)
_SHARD_MB = flags.DEFINE_integer(
    "shard_mb", 0, "MB (10^6 bytes) of vectors per shard at most; default: the run's encode.shard_mb", lower_bound=0
)
_TOKENS_PER_BATCH = flags.DEFINE_integer("tokens_per_batch", None, "default: the run's encode.tokens_per_batch")
_STORE = flags.DEFINE_string(
    "store", "", "folder of token stores; default: the run's data.store, else the user's cache"
)
_LEASE = flags.DEFINE_integer(
    "lease", 300, "seconds without a sign of life after which other hosts hold this job to be dead", lower_bound=1
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", 'only where hosts must start together, as those of a TPU slice: "auto", or host:port'
)
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
    if not _CORPUS.value and not _DELETE.value:
        raise ValueError("give --corpus (a folder or file with passages), or --delete (a file of ids)")
    if _DELETE.value and (_CORPUS.value or _APPEND.value):
        raise ValueError("--delete deletes, and nothing else: leave --corpus and --append out, and run them after it")
    if _DELETE.value:
        delete()
    else:
        encode()


def encode() -> None:
    from jaxret import distributed
    from jaxret.memory import keep_freed_memory
    from jaxret.models.encoders.fused import told
    from jaxret.retrieval.change import append_corpus
    from jaxret.retrieval.encode import encode_corpus
    from jaxret.retrieval.retrieve import corpus_folder
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
    settings: dict[str, Any] = {
        "on_error": _ON_ERROR.value,
        "dtype": _DTYPE.value,
        "shard_rows": _SHARD_ROWS.value,
        "shard_mb": _SHARD_MB.value,
        "store": _STORE.value,
        "lease": float(_LEASE.value),
    }
    if _APPEND.value:
        folder = corpus_folder(run.workdir, _NAME.value, "--name")
        result = append_corpus(run, _CORPUS.value, folder, **settings)
    else:
        result = encode_corpus(run, _CORPUS.value, _NAME.value, **settings)
    whole = f", a part of {result.folder.parent}" if _APPEND.value else ""
    print(f"{result.passages:,} passages are in {result.folder}{whole}")


def delete() -> None:
    from jaxret.retrieval.change import delete_passages
    from jaxret.retrieval.retrieve import corpus_folder
    from jaxret.runs.workdir import Workdir

    folder = corpus_folder(Workdir(_WORKDIR.value), _NAME.value, "--name")
    deleted, left = delete_passages(folder, _DELETE.value)
    print(f"{deleted:,} passages deleted from {folder}; {left:,} are left")
