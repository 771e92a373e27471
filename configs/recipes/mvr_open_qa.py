"""MVR on open-domain question answering, from BERT-base (:bert) or coCondenser (:cocondenser)."""

from ml_collections import ConfigDict

from configs.base import require_suffix
from configs.mvr import get_config as mvr

CHECKPOINTS = {"bert": "bert-base-uncased", "cocondenser": "Luyu/co-condenser-wiki"}
SUFFIXES = tuple(CHECKPOINTS)


def get_config(encoder: str = "bert") -> ConfigDict:
    require_suffix("recipes/mvr_open_qa.py", encoder, SUFFIXES)
    c = mvr()
    c.encoder.checkpoint = CHECKPOINTS[encoder]
    c.optimizer.warmup_steps = 1237  # as DPR
    return c
