"""SPLADE: a weight for every word of the vocabulary, from the MLM head, kept sparse by penalties."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.encoder.checkpoint = "Luyu/co-condenser-marco"  # it has an MLM head, as BERT and DistilBERT have
    c.encoder.dtype = "bfloat16"
    c.encoder.tied = True
    c.head.name = "splade"
    c.tokens.query_length = 128
    c.tokens.passage_length = 128
    c.loss.sparsity.query, c.loss.sparsity.passage, c.loss.sparsity.steps = 0.01, 0.01, 1000
    return c
