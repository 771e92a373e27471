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

from jaxret.cli.flags import OptionFlags
from jaxret.index.encoding.encode_request import EncodeRequest

_REQUEST = OptionFlags(EncodeRequest)


def main() -> None:
    request = _REQUEST()
    from jaxret.index.encoding.run_encode import run_encode

    run_encode(request)
