"""Reranks a run by a cross-encoder, which reads query and passage together; or scores training data with it:

jaxret rerank --workdir=runs/cross --run=FILE --queries=FILE --corpus=FILE --out=FILE     writes a TREC run and,
  with --qrels, its evaluation
jaxret rerank --model=FOLDER --run=... (as above)                  with a cross-encoder of transformers, untrained here
jaxret rerank --workdir=runs/cross --train=FILE --out=FILE.jsonl   writes training data with scores, for distillation
"""

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
    from jaxret.data.formats import Corpus
    from jaxret.experiments.rerank_run import RerankJob, rerank_run
    from jaxret.experiments.score_examples import score_examples
    from jaxret.parallel.processes import require_platform
    from jaxret.runs.reranker import open_pretrained_reranker, open_reranker

    if bool(_WORKDIR.value) == bool(_MODEL.value):
        raise ValueError("give either --workdir (the run of a cross-encoder) or --model (one in transformers' files)")
    if bool(_RUN.value) == bool(_TRAIN.value):
        raise ValueError("give either --run (what to rerank) or --train (what to score)")
    of_runs = (_QUERIES, _CORPUS, _QRELS, _MEASURES, _SELF_MATCHES, _K, _TAIL, _MATCH, _LATENCY)
    extra_flags = [flag.name for flag in of_runs if flag.present]
    if _TRAIN.value and extra_flags:
        raise ValueError(f"--{extra_flags[0]} needs --run (a run to rerank); with --train all passages are scored")
    if _RUN.value and _NEGATIVES_RUN.present:
        raise ValueError("--negatives_run needs --train (training data); leave it out")
    if _RUN.value and not (_QUERIES.value and _CORPUS.value):
        raise ValueError("--run needs --queries and --corpus, the texts of the run")
    corpus = Corpus.open(_CORPUS.value) if _RUN.value else None
    require_platform(_PLATFORM.value, "--platform")
    lengths = {"query_length": _QUERY_LENGTH.value, "passage_length": _PASSAGE_LENGTH.value}
    if _MODEL.value:
        reranker = open_pretrained_reranker(
            _MODEL.value, **lengths, tokens_per_batch=_TOKENS.value, download=_DOWNLOAD.value
        )
    else:
        reranker = open_reranker(_WORKDIR.value, _CHECKPOINT.value, **lengths, tokens_per_batch=_TOKENS.value)
    if corpus is None:
        split = _SPLIT.value or "train"
        score_examples(reranker, _TRAIN.value, _OUT.value, split, _NEGATIVES_RUN.value, _ON_ERROR.value)
    else:
        job = RerankJob(
            run=_RUN.value,
            corpus=corpus,
            queries=_QUERIES.value,
            out=_OUT.value,
            depth=_K.value,
            tail=_TAIL.value,
            on_error=_ON_ERROR.value,
            qrels=_QRELS.value,
            split=_SPLIT.value or "test",
            measures=_MEASURES.value,
            self_matches=_SELF_MATCHES.value,
            match=_MATCH.value,
            latency=_LATENCY.value,
        )
        rerank_run(reranker, job)
