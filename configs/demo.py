"""The embedded default: configs/minilm.py on the documentation of the Python that runs it, in minutes on two cores.

The suffix names the system, as there; `jaxret demo` trains all three and fills in where the data is.
"""

from ml_collections import ConfigDict

from configs.minilm import get_config as minilm

SUFFIXES = ("mlr", "dual_encoder", "as_it_comes")


def get_config(system: str = "mlr") -> ConfigDict:
    c = minilm(system)
    c.tokens.query_length = 24
    c.tokens.passage_length = 48
    c.data.train = c.data.dev = "runs/demo/data/pairs"  # written by jaxret demo
    c.optimizer.learning_rate = 3e-5
    if system != "as_it_comes":
        c.train.steps = 20  # a third of an epoch: what two cores do in half a minute
    c.validation.pool_size = 250
    return c
