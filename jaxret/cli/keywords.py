"""Writes pseudo-queries from the (English) words of the passages, for use without a query generator:

jaxret keywords --corpus=FOLDER_OR_FILE --out=FILE
"""

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

_CORPUS = define_flag(shared_options.corpus(required=True))
_OUT = shared_flags.out_file("file to write; data.pseudo_queries reads it")
_COUNT = flags.DEFINE_integer("count", 8, "words for each passage", lower_bound=1)


def main() -> None:
    from jaxret.data.formats import Corpus
    from jaxret.mining.keywords import write_keywords
    from jaxret.parallel.events import emit

    with_keywords, total = write_keywords(Corpus.open(_CORPUS.value), _OUT.value, _COUNT.value)
    emit("file", kind="pseudo-queries", path=_OUT.value)
    print(f"{with_keywords:,} of {total:,} passages have keywords, written to {_OUT.value}")
