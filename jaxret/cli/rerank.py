"""Reranks rankings with a cross-encoder, which reads query and passage together, or scores training data:

jaxret rerank --workdir=runs/cross --run=FILE --queries=FILE --corpus=FILE --out=FILE     writes a TREC run and,
  with --qrels, its evaluation
jaxret rerank --model=FOLDER --run=... (as above)                  with a cross-encoder of transformers
jaxret rerank --workdir=runs/cross --train=FILE --out=FILE.jsonl   writes training data with scores, for distillation
"""

import sys

from absl import flags

from jaxret.cli import shared_flags

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of the run of a cross-encoder")
_MODEL = flags.DEFINE_string(
    "model", "", "instead of --workdir: folder or hub name of a cross-encoder of transformers, with one label"
)
_DOWNLOAD = shared_flags.download()
_OUT = shared_flags.out_file("file to write")
_RUN = flags.DEFINE_string("run", "", "rankings to rerank: a TREC run, or another format of docs/data.md")
_QUERIES = shared_flags.queries()
_CORPUS = shared_flags.corpus()
_QRELS = shared_flags.qrels()
_MEASURES = shared_flags.measures()
_SELF_MATCHES = shared_flags.self_matches()
_MATCH = shared_flags.match()
_TRAIN = flags.DEFINE_string("train", "", "instead of --run: training data; all their passages are scored")
_NEGATIVES_RUN = flags.DEFINE_string(
    "negatives_run", "", "with --train=FOLDER: rankings with its negatives, as data.negatives_run"
)
_SPLIT = flags.DEFINE_string("split", "", "split of a folder; default: test, or train with --train")
_K = flags.DEFINE_integer("k", 100, "passages per query to score", lower_bound=1)
_LATENCY = shared_flags.latency()
_TAIL = flags.DEFINE_bool(
    "tail", True, "also write the other passages, after the scored ones; use --notail for a teacher's scores"
)
_CHECKPOINT = shared_flags.checkpoint()
_QUERY_LENGTH = shared_flags.query_length(", or 128")
_PASSAGE_LENGTH = shared_flags.passage_length(", or the encoder's limit")
_TOKENS = shared_flags.tokens_per_batch()
_PLATFORM = shared_flags.platform()
_ON_ERROR = shared_flags.on_error()


def main() -> None:
    from jaxret.experiments.rerank_request import RerankRequest

    request = RerankRequest(
        out=_OUT.value,
        workdir=_WORKDIR.value,
        model=_MODEL.value,
        checkpoint=_CHECKPOINT.value,
        download=_DOWNLOAD.value,
        run=_RUN.value,
        train=_TRAIN.value,
        split=_SPLIT.value,
        negatives_run=_NEGATIVES_RUN.value,
        queries=_QUERIES.value,
        corpus=_CORPUS.value,
        qrels=_QRELS.value,
        measures=None if _MEASURES.value is None else tuple(_MEASURES.value),
        self_matches=_SELF_MATCHES.value,
        k=_K.value,
        tail=_TAIL.value,
        match=_MATCH.value,
        latency=_LATENCY.value,
        on_error=_ON_ERROR.value,
        query_length=_QUERY_LENGTH.value,
        passage_length=_PASSAGE_LENGTH.value,
        tokens_per_batch=_TOKENS.value,
        platform=_PLATFORM.value,
        explicit_fields=shared_flags.explicit_names(sys.modules[__name__]),
    )
    from jaxret.experiments.rerank import rerank

    rerank(request)
