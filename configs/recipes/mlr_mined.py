"""MLR with mined negatives, from RetroMAE: stage 1 on BM25's, stage 2 again from RetroMAE on 50 of BM25's and, as
records of their own whose positives are retrieved ones, 50 of the stage-1 model's. `jaxret recipe` does both;
configs/recipes/mlr_mined.py:stage1, :stage2 are what each trains with.
"""

from typing import Any

from ml_collections import ConfigDict

from configs.base import require_suffix
from configs.mlr import get_config as mlr

EPOCHS = {"stage1": 40.0, "stage2": 20.0}
SUFFIXES = tuple(EPOCHS)


def stages(stage: str = "") -> tuple[dict[str, Any], ...]:
    ranks = {"depth": 100, "draw": "top"}
    own = {"pools": ["stage1"], "concat": ["stage1"], "positives_from_retrieval": True, "keep": 50}
    return (
        {"name": "stage1", "suffix": "stage1", "mine": {"pools": ["bm25"], "keep": 100, **ranks}},
        {"name": "stage2", "suffix": "stage2", "mine": {**own, **ranks}},
    )


def get_config(stage: str = "stage1") -> ConfigDict:
    require_suffix("recipes/mlr_mined.py", stage, SUFFIXES)
    c = mlr()
    c.encoder.checkpoint = "Shitao/RetroMAE"
    c.loss.local_weight = 0.1
    c.optimizer.learning_rate = 5e-6
    c.train.epochs = EPOCHS[stage]
    c.validation.metric, c.validation.then = "nll", "average_rank"  # from the 32nd epoch on
    return c
