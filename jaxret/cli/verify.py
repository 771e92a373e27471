"""Verifies everything in a folder against its digests, and names what is damaged:

jaxret verify runs/mlr              a run: its files, every array of its checkpoints, its encoded corpora
jaxret verify DIR                   an encoded corpus, an approximate index, or a store of tokens

Nothing is changed without --delete_unused. Exit status 1 if anything is damaged. A warning names what is intact and
probably a mistake: vectors that all point the same way, corpora that different checkpoints encoded, indexes older than
their corpus.
"""

from absl import flags

_DELETE_UNUSED = flags.DEFINE_bool(
    "delete_unused",
    False,
    "in a bucket: delete unused objects of killed jobs; no job may write to the folder meanwhile",
)

ARGUMENTS = {"DIR": "a run, an encoded corpus (runs/NAME/embeddings/CORPUS), one of its indexes, or a store of tokens"}
OPENS_ADDRESSES = True  # a damaged folder cannot be fetched


def main(folder: str) -> None:
    from jaxret.experiments.verify import report_verification

    report_verification(folder, _DELETE_UNUSED.value)
