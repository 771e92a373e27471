"""Measures retrieval with every layer of an encoder, without training, and prints the layers to train:

jaxret probe DATA --workdir=runs/mlr --split=dev
jaxret probe DATA --workdir=runs/new --model=DIRECTORY      first makes a run from a pre-trained model

DATA has queries, judgements and a corpus. Results are eval/DATA.SPLIT.probe.json and a picture of quality over
layers. For a trained run with several vectors per passage, the command also counts which vector wins, as jaxret
diversity does.
"""

from absl import flags

from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.experiments.probe.probe_options import ProbeOptions

WRITES = ("workdir",)
ARGUMENTS = {"DATA": "folder with queries, judgements and a corpus"}

_WORKDIR = define_flag(shared_options.workdir("folder of the run; with --model, of the new run"))
_MODEL = flags.DEFINE_string("model", "", "pre-trained model: directory, package:NAME/FOLDER, or name in the cache")
_OPTIONS = OptionFlags(ProbeOptions)
_CHECKPOINT = define_flag(shared_options.checkpoint())


def main(data: str) -> None:
    from jaxret.data.formats import Corpus
    from jaxret.experiments.probe.probe_report import report_probe
    from jaxret.experiments.searches.evaluation_queries import EvaluationSource
    from jaxret.export.import_model import make_run
    from jaxret.parallel.events import emit, without_events
    from jaxret.runs.run import open_run

    options = _OPTIONS()
    # Opened first, so that an error leaves no run behind.
    corpus, source = Corpus.open(data), EvaluationSource.open(data, data, options.split)
    if _MODEL.value:
        with without_events():  # nothing is trained
            make_run(_MODEL.value, _WORKDIR.value)
        emit("run", workdir=_WORKDIR.value, model=_MODEL.value, notes=[])
    print(report_probe(open_run(_WORKDIR.value, _CHECKPOINT.value), source, corpus, options))
