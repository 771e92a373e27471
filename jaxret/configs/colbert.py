"""ColBERT. By default the papers' baseline: the query is one vector, self-contrastive pooling leaves [CLS] at
inference. configs/colbert.py:late is full late interaction: a vector of 128 numbers for every token on both sides.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

SUFFIXES = ("single", "late")


def get_config(kind: str = "single") -> ConfigDict:
    require_suffix("colbert.py", kind, SUFFIXES)
    c = base()
    c.encoder.dtype = "bfloat16"
    c.head.name = "colbert"
    if kind == "late":
        c.head.colbert.late = True
        c.head.colbert.projection = 128
        c.normalize = True
        c.encoder.tied = True
        c.tokens.query_length = 32
        c.encode.dtype = "float16"
    else:
        c.pooling = "self_contrastive"
        c.loss.local_weight = 0.01
    return c
