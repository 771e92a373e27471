"""MLR: several layers represent a passage; self-contrastive pooling searches with one vector.

The values are those of the paper for open-domain question answering with BERT-base on 4 GPUs
(optimizer.reference_processes in configs/base.py).
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.dtype = "bfloat16"
    config.head.name = "mlr"
    config.head.mlr.chosen = (10, 12)
    config.pooling = "self_contrastive"
    config.loss.local_weight = 1.0  # 0.1 for all twelve layers
    return config
