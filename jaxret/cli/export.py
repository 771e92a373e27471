"""Exports a run to the files of another library, reads them back, and compares the vectors:

jaxret export --workdir=runs/mlr --to=sentence-transformers --out=FOLDER
"""

from absl import flags

from jaxret.cli import shared_flags

_WORKDIR = shared_flags.workdir("folder of a trained run")
_TO = flags.DEFINE_enum(
    "to",
    None,
    ["hf", "sentence-transformers", "onnx", "pylate", "pyserini", "anserini"],
    "library to export to",
    required=True,
)
_OUT = shared_flags.out("new folder to write")
_CORPUS = shared_flags.encoded_corpus()
_QUERIES = shared_flags.queries("none; they are exported by --to=anserini")
_CHECKPOINT = shared_flags.checkpoint()


def main() -> None:
    from jaxret.export.export import export

    print(export(_WORKDIR.value, _TO.value, _OUT.value, _CHECKPOINT.value, _CORPUS.value, _QUERIES.value))
