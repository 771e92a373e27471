"""Aggretriever on MS MARCO's official corpus (no titles): 8 queries a step with 7 BM25 negatives each, 3 epochs.
configs/recipes/aggretriever_msmarco.py:bert, :distilbert, :condenser, :cocondenser
"""

from ml_collections import ConfigDict

from configs.aggretriever import get_config as aggretriever
from configs.base import one_stage as stages  # noqa: F401
from configs.base import require_suffix

CHECKPOINTS = {
    "bert": "bert-base-uncased",
    "distilbert": "distilbert-base-uncased",
    "condenser": "Luyu/condenser",
    "cocondenser": "Luyu/co-condenser-marco",
}
SUFFIXES = tuple(CHECKPOINTS)


def get_config(encoder: str = "bert") -> ConfigDict:
    require_suffix("recipes/aggretriever_msmarco.py", encoder, SUFFIXES)
    c = aggretriever()
    c.encoder.checkpoint = CHECKPOINTS[encoder]
    c.tokens.passage_length = 128
    c.data.negatives = 7
    c.optimizer.learning_rate = 5e-6
    c.optimizer.warmup_fraction = 0.1
    c.optimizer.clip_norm = 1.0
    c.train.batch_size = 8
    c.train.epochs = 3.0
    return c
