"""SPLADE: a weight for every word of the vocabulary, from the MLM head, kept sparse by penalties."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.checkpoint = "Luyu/co-condenser-marco"  # like BERT and DistilBERT, it has an MLM head
    config.encoder.dtype = "bfloat16"
    config.encoder.tied = True
    config.head.name = "splade"
    config.tokens.query_length = 128
    config.tokens.passage_length = 128
    config.loss.sparsity.query, config.loss.sparsity.passage, config.loss.sparsity.steps = 0.01, 0.01, 1000
    return config
