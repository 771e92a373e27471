"""MLR with mined negatives, from RetroMAE. Stage 1 trains on the negatives of the training file; stage 2 trains, again
from RetroMAE, on 50 of these and, as records of their own whose positives are retrieved ones, 50 of the stage-1 model's.
`jaxret recipe` does both. configs/recipes/mlr_mined.py:dual_encoder is what the paper compares it with (table 3).

The paper takes the last checkpoint on NQ and TriviaQA, which is this config's; on SQuAD the best on the dev set:
--config.validation.best=metric. Warm-up is 5 % of the steps (appendix A); the code has
--config.optimizer.warmup_steps=1237
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import require_suffix
from jaxret.configs.mlr import get_config as mlr

SUFFIXES = ("mlr", "dual_encoder")


def stages(system: str = "mlr") -> tuple[dict[str, Any], ...]:
    mining = {"pools": ["stage1"], "concat": ["data"], "positives_from_retrieval": True, "keep": 50}
    # The code's scripts change to the average rank at validation 17 of 20 on SQuAD. On NQ and TriviaQA they do not
    # change at all; there the last checkpoint counts.
    second = {"train.epochs": 20.0, "validation.then_from": 17.0}
    return (
        {"name": "stage1"},
        {"name": "stage2", "mine": {**mining, "depth": 100, "draw": "top"}, "config": second},
    )


def get_config(system: str = "mlr") -> ConfigDict:
    require_suffix("recipes/mlr_mined.py", system, SUFFIXES)
    config = mlr()
    config.encoder.checkpoint = "Shitao/RetroMAE"
    config.loss.local_weight = 0.1
    if system == "dual_encoder":
        config.head.name, config.pooling, config.loss.local_weight = "dual_encoder", "none", 0.0
    config.optimizer.learning_rate = 5e-6
    config.train.epochs = 40.0
    config.validation.metric, config.validation.then = "nll", "average_rank"  # from the 32nd epoch on
    config.validation.best = "last"
    return config
