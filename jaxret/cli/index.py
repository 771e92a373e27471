"""Builds an approximate index of an encoded corpus with FAISS, and measures its recall of exact search:

jaxret index --workdir=runs/mlr --factory=IVF4096,PQ64 --queries=FOLDER --qrels=FOLDER --split=dev
jaxret search --workdir=runs/mlr --index=IVF4096,PQ64 --query="how do I ...?"

A search uses an index only with --index. Run the same command again to continue, or to measure with other
--parameters.
"""

from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.search.search_options import IndexOptions

_WORKDIR = define_flag(shared_options.workdir())
_CORPUS = define_flag(shared_options.encoded_corpus())
_OPTIONS = OptionFlags(IndexOptions, factory=None)


def main() -> None:
    from jaxret.experiments.build_index import index_corpus
    from jaxret.runs.workdir import Workdir

    index_corpus(Workdir(_WORKDIR.value), _OPTIONS(), _CORPUS.value)
