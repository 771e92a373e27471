"""SPLADE on MS MARCO's official corpus (no titles): Tevatron's example, which reports RR@10 .3770.

32 queries per step with 7 BM25 negatives each, 3 epochs, one encoder for queries and passages. Its trainer has no dev set.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import one_stage as stages  # noqa: F401
from jaxret.configs.splade import get_config as splade


def get_config() -> ConfigDict:
    config = splade()
    config.data.negatives = 7
    config.optimizer.learning_rate = 5e-6
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.clip_norm = 1.0
    config.train.batch_size = 32
    config.train.epochs = 3.0
    config.validation.best = "last"
    return config
