"""Condenser (Gao & Callan 2021) on BERT-base: 8 epochs, a head of 2 layers that reads layer 6 and the last [CLS]."""

from ml_collections import ConfigDict

from jaxret.configs.pretraining.mlm import get_config as mlm


def get_config() -> ConfigDict:
    config = mlm()
    config.pretraining.method = "condenser"
    config.pretraining.length = 512
    config.train.batch_size = 1024
    return config
