"""Aggretriever: weights of the vocabulary's words pruned to 640 numbers, next to 128 of [CLS]."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.encoder.dtype = "bfloat16"
    c.encoder.tied = True
    c.head.name = "aggretriever"
    c.tokens.query_length = 32
    c.tokens.passage_length = 156
    return c
