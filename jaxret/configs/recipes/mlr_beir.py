"""MLR trained on MS MARCO and evaluated on BEIR: one tied encoder as in the paper's code, 10 epochs, one stage.

The suffix :dual_encoder is the paper's baseline (table 5).
"""

from ml_collections import ConfigDict

from jaxret.configs.base import one_stage as stages  # noqa: F401
from jaxret.configs.base import require_suffix
from jaxret.configs.recipes.mlr_msmarco import get_config as mlr_msmarco

SUFFIXES = ("mlr", "dual_encoder")


def get_config(system: str = "mlr") -> ConfigDict:
    require_suffix("recipes/mlr_beir.py", system, SUFFIXES)
    config = mlr_msmarco(system)
    config.encoder.checkpoint = "Shitao/RetroMAE"
    config.encoder.tied = True
    config.optimizer.learning_rate = 3e-5
    config.train.epochs = 10.0
    return config
