"""MLR trained on MS MARCO to be tried on all of BEIR: one tied encoder, 10 epochs."""

from ml_collections import ConfigDict

from configs.base import one_stage as stages  # noqa: F401
from configs.recipes.mlr_msmarco import get_config as mlr_msmarco


def get_config() -> ConfigDict:
    c = mlr_msmarco()
    c.encoder.checkpoint = "Shitao/RetroMAE"
    c.encoder.tied = True
    c.optimizer.learning_rate = 3e-5
    c.train.epochs = 10.0
    return c
