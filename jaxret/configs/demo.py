"""The embedded demo: configs/minilm.py on documentation of Python, in minutes on two cores.

Training begins with the first five layers of MiniLM's six, as they come. Its makers tuned it for retrieval through the
last layer: minutes more add little to all six, and much to five. The suffix is the system: mlr, dual_encoder,
first_layers (the start, nothing trained) or as_it_comes (all of MiniLM, nothing trained). `jaxret demo` runs them all
and fills in where the data is.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import require_suffix
from jaxret.configs.minilm import get_config as minilm

SUFFIXES = ("mlr", "dual_encoder", "first_layers", "as_it_comes")


def get_config(system: str = "mlr") -> ConfigDict:
    require_suffix("demo.py", system, SUFFIXES)
    config = minilm("as_it_comes" if system == "first_layers" else system)
    if system != "as_it_comes":
        config.encoder.layers = 5
    if system == "mlr":
        config.head.mlr.chosen = (4, 5)
    if system in ("mlr", "dual_encoder"):
        config.train.steps = 12  # a third of an epoch, in half a minute on two cores
    config.tokens.query_length = 32
    config.tokens.passage_length = 64  # a quarter of the docstrings is longer
    config.data.train = config.data.dev = "runs/demo/data/pairs"  # written by jaxret demo
    config.optimizer.learning_rate = 2e-4
    config.validation.pool_size = 250
    return config
