"""MLR with mined negatives, from RetroMAE: stage 1 on BM25 negatives, stage 2 again from RetroMAE on BM25's and the
stage-1 model's (a DPR file with 50 of each as its hard_negative_ctxs). configs/recipes/mlr_mined.py:stage1, :stage2
"""

from ml_collections import ConfigDict

from configs.base import require_suffix
from configs.mlr import get_config as mlr

EPOCHS = {"stage1": 40.0, "stage2": 20.0}
SUFFIXES = tuple(EPOCHS)


def get_config(stage: str = "stage1") -> ConfigDict:
    require_suffix("recipes/mlr_mined.py", stage, SUFFIXES)
    c = mlr()
    c.encoder.checkpoint = "Shitao/RetroMAE"
    c.loss.local_weight = 0.1
    c.optimizer.learning_rate = 5e-6
    c.train.epochs = EPOCHS[stage]
    c.validation.metric, c.validation.then = "nll", "average_rank"  # from the 32nd epoch on
    return c
