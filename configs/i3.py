"""I3: a passage's vector has read queries that the passage may answer, imagined by a small reconstructor.

As it stands the paper's model with retrieval pre-training (12 layers, 1 + 1 in the head).
"""

from ml_collections import ConfigDict

from configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.encoder.dtype = "bfloat16"
    c.head.name = "implicit"
    c.data.pseudo_queries = "query"
    c.tokens.query_length = 32
    c.tokens.passage_length = 140
    c.optimizer.name = "lamb"
    c.optimizer.decay = "none"
    c.optimizer.warmup_fraction = 0.0
    c.optimizer.clip_norm = 0.0
    c.optimizer.eps = 1e-6
    return c
