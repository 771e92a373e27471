"""Masked language modelling of whole words: a BERT goes on learning, on the corpus that it will search."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.task = "pretraining"
    c.encoder.dtype = "bfloat16"
    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup_fraction = 0.1
    c.optimizer.weight_decay = 0.01
    c.optimizer.clip_norm = 1.0
    c.train.batch_size = 256
    c.train.epochs = 8.0
    c.train.checkpoint_every = 1000
    return c
