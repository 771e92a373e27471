"""Aggretriever: weights of the vocabulary's words pruned to 640 numbers, next to 128 of [CLS]."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.dtype = "bfloat16"
    config.encoder.tied = True
    config.head.name = "aggretriever"
    config.tokens.query_length = 32
    config.tokens.passage_length = 156
    return config
