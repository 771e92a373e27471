"""Makes a run of a pre-trained model, to encode and search with, or to start training from:

jaxret open MODEL --workdir=runs/as-it-comes
"""

from absl import flags

from jaxret.cli import shared_flags

WRITES = ("workdir",)
ARGUMENTS = {"MODEL": "a Hugging Face, sentence-transformers or PyLate directory, or a hub name"}
_WORKDIR = shared_flags.workdir("new folder of the run")
_TOKEN = flags.DEFINE_enum(
    "token",
    "",
    ["", "cls", "mean", "last", "mean_without_first"],
    "vector of a plain encoder: cls or mean; of a language model last or mean_without_first; default: cls, or last "
    "of a causal language model, or mean",
)
_NORMALIZE = flags.DEFINE_boolean("normalize", None, "for a plain encoder: scale vectors to length 1, for cosines")
_TITLE_SEPARATOR = flags.DEFINE_string(
    "title_separator", "auto", "text between title and text of a passage, or [SEP]; auto: as the model implies"
)
_CORPUS = shared_flags.corpus("an example; its first passage is shown as the model reads it")
_DOWNLOAD = shared_flags.download()


def main(model: str) -> None:
    from jaxret.export.import_model import import_model
    from jaxret.parallel.events import emit

    options = _TOKEN.value, _DOWNLOAD.value, _NORMALIZE.value, _TITLE_SEPARATOR.value
    corpus = shared_flags.open_corpus(_CORPUS)
    text = import_model(model, _WORKDIR.value, *options, corpus)
    print(text)
    emit("run", workdir=_WORKDIR.value, model=model, notes=text.splitlines())
