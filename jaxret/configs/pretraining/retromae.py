"""RetroMAE (Xiao et al. 2022) on BERT-base. general: Wikipedia and books, 8 epochs; msmarco: its passages, 20 epochs.
configs/pretraining/retromae.py:general, :msmarco
"""

from ml_collections import ConfigDict

from jaxret.configs.base import require_suffix
from jaxret.configs.pretraining.mlm import get_config as mlm

SUFFIXES = ("general", "msmarco")


def get_config(corpus: str = "general") -> ConfigDict:
    require_suffix("pretraining/retromae.py", corpus, SUFFIXES)
    config = mlm()
    config.pretraining.method = "retromae"
    config.pretraining.mask_rate = 0.3
    config.pretraining.length = 512 if corpus == "general" else 150
    config.train.batch_size = 256 if corpus == "general" else 1024
    config.train.epochs = 8.0 if corpus == "general" else 20.0
    return config
