"""Fuses several systems into one, by ranks or scores in run files, or by the scores that all systems compute:

jaxret fuse bm25.trec dense.trec --out=both.trec --queries=FOLDER --qrels=FOLDER
jaxret fuse bm25.trec dense.trec --method=min_max --weights=0.3,0.7 --out=both.trec
jaxret fuse bm25.trec dense.trec --method=min_max --tune=bm25.dev.trec,dense.dev.trec --tune_qrels=FOLDER --out=FILE
jaxret fuse runs/bm25 runs/mlr --weights=0.3,0.7 --queries=FOLDER --qrels=FOLDER --out=both.trec      exact: each system
  scores every candidate, and the result is exact over all passages
jaxret fuse runs/bm25 runs/mlr --tune=FOLDER --tune_qrels=FOLDER --queries=FOLDER --qrels=FOLDER --out=both.trec
"""

import sys

from absl import flags

from jaxret.cli import shared_flags

ARGUMENTS = {
    "RUN...": "two or more run files of the same queries, in a format of docs/data.md; or folders of runs and BM25"
}

_OUT = shared_flags.out_file("run file to write")
_METHOD = flags.DEFINE_enum(
    "method",
    None,
    ["rrf", "min_max", "z_score", "sum"],
    "how scores become comparable: rrf (the default for files), min_max (the default for folders), "
    "z_score, or sum (only for folders)",
)
_WEIGHTS = flags.DEFINE_list("weights", [], "weight of each run; default: 1 for each")
_CORPUS = flags.DEFINE_string("corpus", "", "with folders: name of the encoded corpus; needed if there are several")
_K = flags.DEFINE_integer("k", 1000, "passages per query", lower_bound=1)
_QUERIES = shared_flags.queries()
_QRELS = shared_flags.qrels()
_SPLIT = shared_flags.split("test")
_MEASURES = flags.DEFINE_list("measures", ["nDCG@10", "RR@10", "R@100"], "measures, named as in ir-measures")
_TUNE = flags.DEFINE_list(
    "tune",
    [],
    "other queries, to choose the weights with the best first measure on them: run files in the same "
    "order; with folders, a folder or file of queries",
)
_TUNE_QRELS = flags.DEFINE_string("tune_qrels", "", "judgements of the queries of --tune")
_TUNE_SPLIT = flags.DEFINE_string("tune_split", "dev", "split of --tune_qrels, if it is a folder")
_SELF_MATCHES = shared_flags.self_matches()


def main(*runs: str) -> None:
    from jaxret.experiments.fuse_runs import FuseJob, fuse_runs

    try:
        weights = [float(weight) for weight in _WEIGHTS.value]
    except ValueError as error:
        raise ValueError(f"--weights={','.join(_WEIGHTS.value)}: these must be numbers") from error
    fuse_runs(
        FuseJob(
            runs=runs,
            out=_OUT.value,
            method=_METHOD.value or "",
            encoded_name=_CORPUS.value,
            weights=weights,
            k=_K.value,
            queries=_QUERIES.value,
            qrels=_QRELS.value,
            split=_SPLIT.value,
            measures=tuple(_MEASURES.value),
            tune_runs=_TUNE.value,
            tune_qrels=_TUNE_QRELS.value,
            tune_split=_TUNE_SPLIT.value,
            self_matches=_SELF_MATCHES.value,
            explicit_fields=shared_flags.explicit_names(sys.modules[__name__]),
        )
    )
