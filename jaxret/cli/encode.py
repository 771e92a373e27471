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

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.index.encode_options import EncodeOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions

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
    from jaxret.index.encode_request import EncodeRequest

    request = EncodeRequest(
        workdir=_WORKDIR.value,
        corpus=_CORPUS.value,
        name=_NAME.value,
        append=_APPEND.value,
        delete=_DELETE.value,
        checkpoint=_CHECKPOINT.value,
        passage_length=_PASSAGE_LENGTH.value,
        tokens_per_batch=_TOKENS_PER_BATCH.value,
        platform=_PLATFORM.value,
        attention=_ATTENTION.value,
        options=_OPTIONS(),
        engine=_ENGINE(),
        processes=_JOB(),
    )
    from jaxret.index.run_encode import run_encode

    run_encode(request)
