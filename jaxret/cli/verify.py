"""Compares all files of a folder with their digests, and names damaged ones:

jaxret verify runs/mlr              a run: its files, every array of its checkpoints, its encoded corpora
jaxret verify DIR                   an encoded corpus, an approximate index, or a token store

Without --delete_unused, no file is changed. The exit status is 1 if a file is damaged. Warnings name probable mistakes
in intact files: equal vectors of different passages, corpora of different checkpoints, indexes older than their corpus.
"""

from absl import flags

_DELETE_UNUSED = flags.DEFINE_bool(
    "delete_unused",
    False,
    "in a bucket: delete unused objects of killed jobs; no job may write to the folder meanwhile",
)

ARGUMENTS = {"DIR": "a run, an encoded corpus (runs/NAME/embeddings/CORPUS), one of its indexes, or a token store"}
OPENS_ADDRESSES = True  # a damaged folder cannot be fetched


def main(folder: str) -> None:
    from jaxret.experiments.verify import report_verification

    report_verification(folder, _DELETE_UNUSED.value)
