"""Writes a run in the files of other libraries, reads them back and compares:

jaxret export --workdir=runs/mlr --to=sentence-transformers --out=FOLDER
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "a trained run", required=True)
_TO = flags.DEFINE_enum(
    "to", None, ["hf", "sentence-transformers", "onnx", "pylate", "pyserini"], "whose files", required=True
)
_OUT = flags.DEFINE_string("out", None, "folder to be made", required=True)
_CORPUS = flags.DEFINE_string("corpus", "", "of pyserini: the encoded corpus, where there are several")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")


def main() -> None:
    from jaxret.tools.export import export

    print(export(_WORKDIR.value, _TO.value, _OUT.value, _CHECKPOINT.value, _CORPUS.value))
