"""Reranks a run by a cross-encoder, which reads query and passage together; or scores training data, for a retriever to
learn from:

jaxret rerank --workdir=runs/cross --run=FILE --queries=FILE --corpus=FILE --out=FILE     writes a TREC run and,
  with --qrels, its evaluation
jaxret rerank --model=FOLDER --run=... (as above)                  with a cross-encoder of transformers, as it comes
jaxret rerank --workdir=runs/cross --train=FILE --out=FILE.jsonl   writes training data with scores
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of the run of a cross-encoder")
_MODEL = flags.DEFINE_string(
    "model", "", "instead: a folder or hub name of a cross-encoder in transformers' files (one label)"
)
_DOWNLOAD = flags.DEFINE_bool("download", False, "fetch a --model that is not in the local cache")
_OUT = flags.DEFINE_string("out", None, "file to write", required=True)
_RUN = flags.DEFINE_string("run", "", "what is reranked: a TREC run, or results in a format of docs/data.md")
_QUERIES = flags.DEFINE_string("queries", "", "folder or file with its queries")
_CORPUS = flags.DEFINE_string("corpus", "", "folder or file with its passages")
_QRELS = flags.DEFINE_string(
    "qrels", "", "folder or file with judgements: measures before and after are printed, and an evaluation written"
)
_MEASURES = flags.DEFINE_list("measures", None, "as those of jaxret search")
_SELF_MATCHES = flags.DEFINE_enum(
    "self_matches",
    "auto",
    ["auto", "keep", "remove"],
    "passages with the id of their query: auto removes them where queries are passages (ArguAna)",
)
_MATCH = flags.DEFINE_enum(
    "match", "string", ["string", "regex"], "what the queries' answers are: strings, or regular expressions"
)
_TRAIN = flags.DEFINE_string("train", "", "instead of a run: training data, all of whose passages are scored")
_NEGATIVES_RUN = flags.DEFINE_string("negatives_run", "", "of a folder of training data: as data.negatives_run")
_SPLIT = flags.DEFINE_string("split", "", "split, where a folder is given; default: test, of --train train")
_K = flags.DEFINE_integer("k", 100, "passages of a query that are scored; the others stay behind", lower_bound=1)
_LATENCY = flags.DEFINE_integer(
    "latency", 100, "queries scored once more, one at a time, to time it (0: none)", lower_bound=0
)
_TAIL = flags.DEFINE_bool("tail", True, "write those that were not scored, too, behind; --notail for a teacher's run")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")
_QUERY_LENGTH = flags.DEFINE_integer("query_length", None, "tokens of a query at most; default: as in training, or 128")
_PASSAGE_LENGTH = flags.DEFINE_integer(
    "passage_length", None, "tokens of a passage at most; default: as in training, or what the encoder has"
)
_TOKENS = flags.DEFINE_integer("tokens_per_batch", None, "tokens that are computed at a time; default: as in training")
_PLATFORM = flags.DEFINE_string(
    "platform", "", "tpu, gpu or cpu: it is an error if there is none; default: what is found"
)
_ON_ERROR = flags.DEFINE_enum("on_error", "error", ["error", "skip"], "what to do with bad records")


def main() -> None:
    from jaxret.distributed import require_platform
    from jaxret.runs.reranker import open_reranker, open_stock
    from jaxret.tools.rerank import Judge, rerank_run, score_examples

    if bool(_WORKDIR.value) == bool(_MODEL.value):
        raise ValueError("give either --workdir (the run of a cross-encoder) or --model (one in transformers' files)")
    if bool(_RUN.value) == bool(_TRAIN.value):
        raise ValueError("give either --run (what to rerank) or --train (what to score)")
    of_runs = (_QUERIES, _CORPUS, _QRELS, _MEASURES, _SELF_MATCHES, _K, _TAIL, _MATCH, _LATENCY)
    ignored = [flag.name for flag in of_runs if flag.present]
    if _TRAIN.value and ignored:
        raise ValueError(f"--{ignored[0]} is of a run that is reranked (--run); with --train all passages are scored")
    if _RUN.value and _NEGATIVES_RUN.present:
        raise ValueError("--negatives_run is of training data (--train); leave it out")
    if _RUN.value and not (_QUERIES.value and _CORPUS.value):
        raise ValueError("--run needs --queries and --corpus: the texts of what it names")
    require_platform(_PLATFORM.value, "--platform")
    lengths = {"query_length": _QUERY_LENGTH.value, "passage_length": _PASSAGE_LENGTH.value}
    if _MODEL.value:
        reranker = open_stock(_MODEL.value, **lengths, tokens_per_batch=_TOKENS.value, download=_DOWNLOAD.value)
    else:
        reranker = open_reranker(_WORKDIR.value, _CHECKPOINT.value, **lengths, tokens_per_batch=_TOKENS.value)
    if _TRAIN.value:
        split = _SPLIT.value or "train"
        score_examples(reranker, _TRAIN.value, _OUT.value, split, _NEGATIVES_RUN.value, _ON_ERROR.value)
    else:
        rerank_run(
            reranker,
            run=_RUN.value,
            corpus=_CORPUS.value,
            queries=_QUERIES.value,
            out=_OUT.value,
            depth=_K.value,
            judge=Judge(
                _QRELS.value, _SPLIT.value or "test", _MEASURES.value, _SELF_MATCHES.value, _MATCH.value, _LATENCY.value
            ),
            on_error=_ON_ERROR.value,
            tail=_TAIL.value,
        )
