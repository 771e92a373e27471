"""I3: a passage's vector depends on a pseudo-query that a small reconstructor generates from the passage.

The default is the paper's model for encoders with retrieval pre-training: 12 layers, and 1 + 1 in the head.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.dtype = "bfloat16"
    config.head.name = "i3"
    config.data.pseudo_queries = "query"
    config.tokens.query_length = 32
    config.tokens.passage_length = 140
    config.optimizer.name = "lamb"
    config.optimizer.decay = "none"
    config.optimizer.warmup_fraction = 0.0
    config.optimizer.clip_norm = 0.0
    config.optimizer.eps = 1e-6
    return config
