"""ColBERT. The default is a baseline of the MLR paper: a query has one vector, and self-contrastive pooling searches
with [CLS] of a passage. The suffix :late is full late interaction: every token has a vector of 128 numbers.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

SUFFIXES = ("single", "late")


def get_config(kind: str = "single") -> ConfigDict:
    require_suffix("colbert.py", kind, SUFFIXES)
    config = base()
    config.encoder.dtype = "bfloat16"
    config.head.name = "colbert"
    if kind == "late":
        config.head.colbert.late = True
        config.head.colbert.projection = 128
        config.normalize = True
        config.encoder.tied = True
        config.tokens.query_length = 32
        config.encode.dtype = "float16"
    else:
        config.pooling = "self_contrastive"
        config.loss.local_weight = 0.01
    return config
