"""Encodes a corpus:

jaxret encode --workdir=runs/mlr --corpus=FOLDER_OR_FILE
jaxret encode --workdir=runs/mlr --corpus=MORE --append     adds passages to the encoded corpus --name
jaxret encode --workdir=runs/mlr --corpus=X --dimension=64  cuts the vectors of an encoded corpus; X-64 is the new one
jaxret encode --workdir=runs/mlr --delete=IDS.txt           deletes passages from it by id

jaxret encode --workdir=gs://BUCKET/RUN --corpus=X --engine=ray --workers=8 --resources=GPU:1     by a Ray cluster

Run the same command again to continue an interrupted job. Any number of jobs may run it at the same time, on any hosts
that share the run's folder: each job takes shards that no other job has, also those of dead jobs, and ends when all
shards exist.
"""

from pathlib import Path
from typing import Any

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.index.encode_options import EncodeOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions, RunOpening

_WORKDIR = shared_flags.workdir()
_CORPUS = shared_flags.corpus()
_NAME = flags.DEFINE_string("name", "", "name of the encoded corpus; default: the name of the folder or file")
_APPEND = flags.DEFINE_bool("append", False, "add the passages to the corpus that is encoded as --name")
_DELETE = flags.DEFINE_string("delete", "", "delete passages from the corpus --name: a file with their ids, one a line")
_CHECKPOINT = shared_flags.checkpoint()
_PASSAGE_LENGTH = shared_flags.passage_length()
_TOKENS_PER_BATCH = shared_flags.tokens_per_batch()
_PLATFORM = shared_flags.platform()
_ATTENTION = shared_flags.attention()
_JOB = OptionFlags(JobOptions)
_OPTIONS = OptionFlags(EncodeOptions)
_ENGINE = OptionFlags(EngineOptions)


def main() -> None:
    from jaxret.data.formats import Corpus, source_exists
    from jaxret.index.corpus_folder import corpus_folder
    from jaxret.index.encode import cut_encoded, encode_corpus
    from jaxret.index.ray_encode import EncodeJob, encode_by_ray
    from jaxret.index.update import append_corpus, delete_passages, encoded_passage_length
    from jaxret.models.encoders.fused import describe_attention
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.processes import require_platform
    from jaxret.parallel.progress import print_line
    from jaxret.runs.run import open_run, stored_config
    from jaxret.runs.workdir import Workdir

    if not _CORPUS.value and not _DELETE.value:
        raise ValueError("give --corpus (a folder or file with passages), or --delete (a file of ids)")
    if _DELETE.value and (_CORPUS.value or _APPEND.value):
        raise ValueError("--delete deletes, and nothing else: leave --corpus and --append out, and run them after it")
    if _DELETE.value and not Path(_DELETE.value).exists():
        raise ValueError(
            f"--delete={_DELETE.value}: there is no such file; give a file with ids of passages, one a line"
        )
    options, engine, together = _OPTIONS(), _ENGINE(), _JOB()
    if engine.engine and (_DELETE.value or _APPEND.value or together.coordinator):
        raise ValueError(
            f"--engine={engine.engine}: workers encode a whole corpus; leave --append, --delete and --coordinator out"
        )
    if _DELETE.value:
        folder = corpus_folder(Workdir(_WORKDIR.value), _NAME.value, "--name")
        deletions, passages_left = delete_passages(folder, _DELETE.value)
        print(f"{deletions:,} passages deleted from {folder}; {passages_left:,} are left")
        return
    keep_freed_memory()
    together.join()
    if not engine.engine:  # its workers have the devices
        require_platform(_PLATFORM.value, "--platform")
    stored_config(Workdir(_WORKDIR.value))  # no run is an error before no corpus
    # Where there is nothing at the path, it is the name of an encoded corpus, whose vectors are cut.
    is_name = bool(options.dimension) and not _APPEND.value and not source_exists(_CORPUS.value)
    corpus = None if is_name else Corpus.open(_CORPUS.value)
    length = _PASSAGE_LENGTH.value
    if _APPEND.value and length is None:
        length = encoded_passage_length(corpus_folder(Workdir(_WORKDIR.value), _NAME.value, "--name"))
    open_options: dict[str, Any] = {
        "passage_length": length,
        "tokens_per_batch": _TOKENS_PER_BATCH.value,
        "attention": _ATTENTION.value,
    }
    if engine.engine and corpus:
        opening = RunOpening(_WORKDIR.value, _CHECKPOINT.value, _PLATFORM.value, open_options)
        encode_by_ray(EncodeJob(opening, corpus.source, _NAME.value, options), engine)
    run = open_run(_WORKDIR.value, _CHECKPOINT.value, **open_options)
    print_line(describe_attention(run.config.encoder.attention))
    if corpus is None:
        result = cut_encoded(run, _CORPUS.value, options, _NAME.value)
    elif _APPEND.value:
        folder = corpus_folder(run.workdir, _NAME.value, "--name")
        result = append_corpus(run, corpus, folder, options)
    else:
        result = encode_corpus(run, corpus, _NAME.value, options)
    part_of = f", a part of {result.folder.parent}" if _APPEND.value else ""
    if result.timing:
        print(result.describe_timing())
    print(f"{result.passages:,} passages are in {result.folder}{part_of}")
