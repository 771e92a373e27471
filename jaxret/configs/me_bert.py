"""ME-BERT: a passage's vectors are the last layer's first eight; self-contrastive pooling searches with [CLS].

The values are those of the MLR paper for open-domain question answering. The suffix :t5 is its variant with T5.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix
from jaxret.configs.t5 import use_t5

SUFFIXES = ("bert", "t5")


def get_config(encoder: str = "bert") -> ConfigDict:
    require_suffix("me_bert.py", encoder, SUFFIXES)
    config = base()
    config.encoder.dtype = "bfloat16"
    config.head.name = "me_bert"
    config.head.me_bert.count = 8
    config.pooling = "self_contrastive"
    config.loss.local_weight = 1.0
    return use_t5(config) if encoder == "t5" else config
