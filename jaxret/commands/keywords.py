"""Writes pseudo-queries from the passages' own (English) words, where no query generator is at hand:

jaxret keywords --corpus=FOLDER_OR_FILE --out=FILE
"""

from absl import flags

_CORPUS = flags.DEFINE_string(
    "corpus", None, "folder or file with passages (docs/data.md has the formats)", required=True
)
_OUT = flags.DEFINE_string("out", None, "file to write, for data.pseudo_queries", required=True)
_COUNT = flags.DEFINE_integer("count", 8, "words for each passage", lower_bound=1)


def main() -> None:
    from jaxret.tools.keywords import write_keywords

    found, total = write_keywords(_CORPUS.value, _OUT.value, _COUNT.value)
    print(f"{found:,} of {total:,} passages have keywords, written to {_OUT.value}")
