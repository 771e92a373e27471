"""MVR: eight viewer tokens, which replace [CLS], are a passage's vectors; the temperature falls from 1 to 0.3."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.dtype = "bfloat16"
    config.head.name = "mvr"
    config.head.mvr.count = 8
    config.loss.annealing_rate = 0.1
    config.loss.local_weight = 0.01
    return config
