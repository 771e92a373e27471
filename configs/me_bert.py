"""ME-BERT: a passage's vectors are the last layer's first eight; self-contrastive pooling leaves [CLS] at inference.

The values of MLR's open-domain question answering runs. configs/me_bert.py:t5 is its T5 variant.
"""

from ml_collections import ConfigDict

from configs.base import get_config as base
from configs.t5 import use_t5


def get_config(encoder: str = "bert") -> ConfigDict:
    c = base()
    c.head.name = "first_tokens"
    c.head.count = 8
    c.pooling = "self_contrastive"
    c.loss.local_weight = 1.0
    c.train.chunk_size = 16
    if encoder not in ("bert", "t5"):
        raise ValueError(f"configs/me_bert.py:{encoder}: the suffix must be bert or t5")
    return use_t5(c) if encoder == "t5" else c
