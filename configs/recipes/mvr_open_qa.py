"""MVR on open-domain question answering, from BERT-base (:bert) or coCondenser (:cocondenser)."""

from ml_collections import ConfigDict

from configs.mvr import get_config as mvr

CHECKPOINTS = {"bert": "bert-base-uncased", "cocondenser": "Luyu/co-condenser-wiki"}


def get_config(encoder: str = "bert") -> ConfigDict:
    c = mvr()
    c.encoder.checkpoint = CHECKPOINTS[encoder]
    c.train.chunk_size = 16
    return c
