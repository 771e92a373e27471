"""I3: a passage's vector depends on pseudo-queries that a small reconstructor generates from the passage.

By default the paper's model with retrieval pre-training (12 layers, 1 + 1 in the head).
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.encoder.dtype = "bfloat16"
    c.head.name = "i3"
    c.data.pseudo_queries = "query"
    c.tokens.query_length = 32
    c.tokens.passage_length = 140
    c.optimizer.name = "lamb"
    c.optimizer.decay = "none"
    c.optimizer.warmup_fraction = 0.0
    c.optimizer.clip_norm = 0.0
    c.optimizer.eps = 1e-6
    return c
