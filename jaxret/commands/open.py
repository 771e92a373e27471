"""Makes a model as it comes a run, to encode, search and start training from:

jaxret open MODEL --workdir=runs/as-it-comes
"""

from absl import flags

ARGUMENTS = {"MODEL": "a Hugging Face, sentence-transformers or PyLate directory, or a hub name"}
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run, to be made", required=True)
_TOKEN = flags.DEFINE_enum("token", "", ["", "cls", "mean"], "of an encoder alone: what its vector is; default: cls")
_NORMALIZE = flags.DEFINE_boolean("normalize", None, "of an encoder alone: vectors of length 1, for cosines")
_DOWNLOAD = flags.DEFINE_boolean("download", False, "fetch a hub name that is not in the local cache")


def main(model: str) -> None:
    from jaxret.tools.open_model import open_model

    print(open_model(model, _WORKDIR.value, _TOKEN.value, _DOWNLOAD.value, _NORMALIZE.value))
