"""Searches an encoded corpus, exactly unless --index or --candidates is given:

jaxret search --workdir=runs/mlr --queries=FILE --qrels=FILE --k=100     writes a TREC run and its evaluation
jaxret search --workdir=runs/mlr --query="how do I ...?"                 prints the best passages
jaxret search --workdir=runs/mlr --interactive                           answers questions as they are typed
jaxret search --workdir=runs/mlr --index=IVF4096,PQ64 --query="..."      approximately, by an index of jaxret index
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_QUERY = flags.DEFINE_string("query", None, "a question to answer here and now")
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "answer questions of the terminal or of standard input, one a line, until an empty line"
)
_QUERIES = flags.DEFINE_string("queries", "", "folder or file with queries (docs/data.md has the formats)")
_QRELS = flags.DEFINE_string("qrels", "", "folder or file with judgements; none: no evaluation")
_SPLIT = flags.DEFINE_string("split", "test", "split, where --queries or --qrels is a folder")
_CORPUS = flags.DEFINE_string(
    "corpus",
    "",
    "the encoded corpus: its name, or the path that was encoded; default: the only one",
)
_FILTER = flags.DEFINE_multi_string(
    "filter",
    [],
    "FIELD:VALUE of passages' metadata: search those that have it alone; of several, one value of each field",
)
_K = flags.DEFINE_integer("k", None, "passages per query; default: 100 for --queries, else 10", lower_bound=1)
_BACKEND = flags.DEFINE_string("backend", "auto", "auto, faiss-gpu, faiss-cpu or xla")
_PRECISION = flags.DEFINE_string(
    "precision", "float32", "in which candidates are found: float32; float16, bfloat16 or int8 (XLA): the same results"
)
_CANDIDATES = flags.DEFINE_string(
    "candidates",
    "",
    "mean:N or muvera:N: of passages with several vectors, score those N that one vector each ranks highest; faster, "
    "and approximate: how much of the exact result was found is printed",
)
_INDEX = flags.DEFINE_string(
    "index", "", "name of an approximate index that finds candidates (jaxret index builds it); default: exact search"
)
_RESCORE = flags.DEFINE_integer(
    "rescore", 0, "with --index: vectors whose passages are scored exactly; default: as measured", lower_bound=0
)
_NPROBE = flags.DEFINE_integer("nprobe", 0, "with --index: lists to look at (IVF); default: as measured", lower_bound=0)
_EF_SEARCH = flags.DEFINE_integer(
    "ef_search", 0, "with --index: nodes to look at (HNSW); default: as measured", lower_bound=0
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")
_QUERY_LENGTH = flags.DEFINE_integer("query_length", None, "tokens of a query at most; default: as in training")
_MEASURES = flags.DEFINE_list(
    "measures", None, "as ir-measures names them; default: nDCG@10,RR@10,R@100,Success@5,Success@20, no deeper than --k"
)
_SELF_MATCHES = flags.DEFINE_enum(
    "self_matches",
    "auto",
    ["auto", "keep", "remove"],
    "passages with the id of their query: auto removes them as BEIR does where queries are passages (ArguAna)",
)
_LATENCY = flags.DEFINE_integer(
    "latency", 100, "questions asked once more, one at a time, to time encoding and search (0: none)", lower_bound=0
)
_DPR_RESULTS = flags.DEFINE_bool("dpr_results", False, "also write the results as DPR does, with texts and has_answer")
_MATCH = flags.DEFINE_enum(
    "match",
    "string",
    ["string", "regex"],
    "what the queries' answers are: strings, or regular expressions (CuratedTREC)",
)
_PLATFORM = flags.DEFINE_string(
    "platform", "", "tpu, gpu or cpu: it is an error if there is none; default: what is found"
)
_ATTENTION = flags.DEFINE_string("attention", None, "plain, flash (TPU) or cudnn (GPU); default: as in training")
_ON_ERROR = flags.DEFINE_enum("on_error", "error", ["error", "skip"], "what to do with bad records")


def main() -> None:
    from jaxret.data.files import check_question
    from jaxret.distributed import require_platform
    from jaxret.retrieval.approximate import Chosen
    from jaxret.retrieval.retrieve import Searcher, choose_corpus
    from jaxret.runs.run import open_run
    from jaxret.tools.asked import of_every_split
    from jaxret.tools.interactive import interact
    from jaxret.tools.search_files import answer, search_files

    if [_QUERY.value is not None, bool(_QUERIES.value), _INTERACTIVE.value].count(True) != 1:
        raise ValueError("give either --query (a question), --queries (a file) or --interactive")
    if _QUERY.value is not None:
        check_question(_QUERY.value)
    if _SPLIT.present and _QUERIES.value and not _QRELS.value and of_every_split(_QUERIES.value, _SPLIT.value):
        raise ValueError(
            f"--split={_SPLIT.value} chooses nothing: {_QUERIES.value} has the queries of every split in one file, "
            f"and judgements say which are of one; give --qrels={_QUERIES.value} too"
        )
    if not _INDEX.value and (_RESCORE.value or _NPROBE.value or _EF_SEARCH.value):
        raise ValueError("--rescore, --nprobe and --ef_search are of an approximate index: give --index=NAME too")
    index = Chosen(_INDEX.value, _RESCORE.value, _NPROBE.value, _EF_SEARCH.value) if _INDEX.value else None
    require_platform(_PLATFORM.value, "--platform")
    run = open_run(_WORKDIR.value, _CHECKPOINT.value, query_length=_QUERY_LENGTH.value, attention=_ATTENTION.value)
    if _INTERACTIVE.value:
        corpus = choose_corpus(run, _CORPUS.value)
        how = (_FILTER.value, True, _PRECISION.value, _CANDIDATES.value, index)
        searcher = Searcher(run, corpus, _BACKEND.value, *how)
        interact(searcher, _K.value or 10)
    elif _QUERY.value is not None:
        answer(
            run,
            _QUERY.value,
            _K.value or 10,
            _CORPUS.value,
            _BACKEND.value,
            filters=_FILTER.value,
            precision=_PRECISION.value,
            candidates=_CANDIDATES.value,
            index=index,
        )
    else:
        search_files(
            run,
            queries=_QUERIES.value,
            qrels=_QRELS.value,
            split=_SPLIT.value,
            k=_K.value or 100,
            measures=_MEASURES.value,
            corpus=_CORPUS.value,
            backend=_BACKEND.value,
            on_error=_ON_ERROR.value,
            label="" if _CHECKPOINT.value == "best" else f"step-{run.checkpoint['step']}",
            filters=_FILTER.value,
            self_matches=_SELF_MATCHES.value,
            latency=_LATENCY.value,
            dpr_results=_DPR_RESULTS.value,
            match=_MATCH.value,
            precision=_PRECISION.value,
            candidates=_CANDIDATES.value,
            index=index,
        )
