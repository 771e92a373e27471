"""Reranks rankings with a cross-encoder, which reads query and passage together, or scores training data:

jaxret rerank --workdir=runs/cross --run=FILE --queries=FILE --corpus=FILE --out=FILE     writes a TREC run and,
  with --qrels, its evaluation
jaxret rerank --model=FOLDER --run=... (as above)                  with a cross-encoder of transformers
jaxret rerank --workdir=runs/cross --train=FILE --out=FILE.jsonl   writes training data with scores, for distillation
"""

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.experiments.rerank_request import RerankRequest

_REQUEST = OptionFlags(RerankRequest, out=shared_flags.out_file("file to write"))


def main() -> None:
    request = _REQUEST()
    from jaxret.experiments.rerank_run import rerank

    rerank(request)
