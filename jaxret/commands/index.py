"""Builds an approximate index of an encoded corpus with FAISS, and measures what it finds of exact search:

jaxret index --workdir=runs/mlr --factory=IVF4096,PQ64 --queries=FOLDER --qrels=FOLDER --split=dev
jaxret search --workdir=runs/mlr --index=IVF4096,PQ64 --query="how do I ...?"

No search uses an index unless --index names it. Run the same command again to go on, or to measure with other settings.
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_FACTORY = flags.DEFINE_string(
    "factory", None, "FAISS's factory string: IVF4096,PQ64, HNSW32, SQ8, OPQ64,IVF4096,PQ64, ...", required=True
)
_CORPUS = flags.DEFINE_string(
    "corpus", "", "the encoded corpus: its name, or the path that was encoded; default: the only one"
)
_NAME = flags.DEFINE_string("name", "", "name of the index; default: the factory string")
_QUERIES = flags.DEFINE_string(
    "queries", "", "folder or file with queries to measure recall with; default: passages' own vectors"
)
_QRELS = flags.DEFINE_string("qrels", "", "folder or file with judgements: of --queries, those that are judged")
_SPLIT = flags.DEFINE_string("split", "test", "split, where --queries or --qrels is a folder")
_SAMPLE = flags.DEFINE_integer("sample", 1000, "queries that recall is measured with at most", lower_bound=1)
_RESCORE = flags.DEFINE_integer(
    "rescore", 200, "vectors of the index whose passages are scored exactly, for each query", lower_bound=1
)
_NPROBE = flags.DEFINE_list("nprobe", [], "lists to look at (IVF): values to measure recall with")
_EF_SEARCH = flags.DEFINE_list("ef_search", [], "nodes to look at (HNSW): values to measure recall with")
_TRAIN_VECTORS = flags.DEFINE_integer(
    "train_vectors", 0, "vectors to train on; default: 64 for each centroid, 65536 at least", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "of the samples and of k-means", lower_bound=0)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step, which encodes --queries")


def main() -> None:
    from jaxret.runs.run import open_run
    from jaxret.runs.workdir import Workdir
    from jaxret.tools.index import index_corpus

    if _QRELS.value and not _QUERIES.value:
        raise ValueError("--qrels says which of --queries are judged: give --queries too")
    run = open_run(_WORKDIR.value, _CHECKPOINT.value) if _QUERIES.value else None
    index_corpus(
        run.workdir if run else Workdir(_WORKDIR.value),
        _FACTORY.value,
        corpus=_CORPUS.value,
        name=_NAME.value,
        run=run,
        queries=_QUERIES.value,
        qrels=_QRELS.value,
        split=_SPLIT.value,
        sample=_SAMPLE.value,
        candidates=_RESCORE.value,
        nprobe=_numbers("nprobe", _NPROBE.value),
        ef_search=_numbers("ef_search", _EF_SEARCH.value),
        train_vectors=_TRAIN_VECTORS.value,
        seed=_SEED.value,
    )


def _numbers(flag: str, values: list[str]) -> list[int]:
    try:
        return [int(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--{flag}={','.join(values)}: whole numbers with commas between are right") from error
