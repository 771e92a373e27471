"""The demo: configs/minilm.py on documentation of Python, in minutes on two cores.

Training starts from the first five of MiniLM's six layers. All six were tuned for retrieval through the last layer, so
minutes of training improve six layers little, and five layers much. The suffix is the system: mlr, dual_encoder,
first_layers (five layers, not trained) or as_it_comes (six layers, not trained). `jaxret demo` runs all of them.
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
