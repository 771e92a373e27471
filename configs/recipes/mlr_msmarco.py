"""MLR on MS MARCO passages: RetroMAE, 15 negatives a query, 4 epochs, both stages alike. The reference does not record
its passage length; 128 is ours."""

from typing import Any

from ml_collections import ConfigDict

from configs.base import two_stages
from configs.mlr import get_config as mlr


def stages() -> tuple[dict[str, Any], ...]:
    """Of 1,000, the 100 first that nobody judged relevant."""
    return two_stages(depth=1000, keep=100, draw="top")


def get_config() -> ConfigDict:
    c = mlr()
    c.encoder.checkpoint = "Shitao/RetroMAE_MSMARCO"
    c.tokens.query_length = 32
    c.tokens.passage_length = 128
    c.data.negatives = 15
    c.train.chunk_size = 32
    c.loss.local_weight = 0.01
    c.optimizer.learning_rate = 1e-5
    c.train.epochs = 4.0
    return c
