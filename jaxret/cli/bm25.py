"""Searches a corpus by its words, with BM25, as a baseline or a first stage:

jaxret bm25 --workdir=runs/bm25 --corpus=FOLDER --queries=FOLDER --qrels=FOLDER     writes a TREC run and its evaluation

The index is built once and stored in the workdir. Results are the same files as those of `jaxret search`, for compare,
rerank, fuse and mine.
"""

from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.search.bm25_settings import BM25Settings

_WORKDIR = define_flag(
    shared_options.workdir("folder of the index and the results; one for each choice of --k1, --b, --language")
)
_CORPUS = define_flag(shared_options.corpus(required=True))
_QUERIES = define_flag(shared_options.queries())
_QRELS = define_flag(shared_options.qrels())
_SPLIT = define_flag(shared_options.split("test"))
_K = define_flag(shared_options.k())
_MEASURES = define_flag(shared_options.measures())
_SETTINGS = OptionFlags(BM25Settings)
_EVALUATION = OptionFlags(EvaluationOptions, k=_K, measures=_MEASURES)


def main() -> None:
    from jaxret.data.formats import Corpus
    from jaxret.experiments.searches.evaluation_queries import EvaluationSource
    from jaxret.experiments.searches.search_bm25 import search_bm25

    if not _QUERIES.value:
        raise ValueError("give --queries (a folder or file with queries)")
    corpus = Corpus.open(_CORPUS.value)
    source = EvaluationSource.open(_QUERIES.value, _QRELS.value, _SPLIT.value)
    search_bm25(_WORKDIR.value, corpus, source, _SETTINGS(), _EVALUATION())
