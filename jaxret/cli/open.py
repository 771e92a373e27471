"""Makes a run from a pre-trained model, for encoding, search, or as the start of training:

jaxret open MODEL --workdir=runs/as-it-comes
"""

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.export.import_options import ImportOptions

WRITES = ("workdir",)
ARGUMENTS = {"MODEL": "a Hugging Face, sentence-transformers or PyLate directory, or a hub name"}
_WORKDIR = define_flag(shared_options.workdir("new folder of the run"))
_OPTIONS = OptionFlags(ImportOptions)
_CORPUS = define_flag(shared_options.corpus("an example; the first passage is printed as the model reads it"))


def main(model: str) -> None:
    from jaxret.export.import_model import import_model
    from jaxret.parallel.events import emit

    corpus = shared_flags.open_corpus(_CORPUS)
    text = import_model(model, _WORKDIR.value, _OPTIONS(), corpus)
    print(text)
    emit("run", workdir=_WORKDIR.value, model=model, notes=text.splitlines())
