"""Masked language modelling of whole words: a BERT continues its pre-training on the corpus that it will search."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.task = "pretraining"
    config.encoder.dtype = "bfloat16"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.train.batch_size = 256
    config.train.epochs = 8.0
    config.train.checkpoint_every = 1000
    return config
