"""Aggretriever on NQ and TriviaQA, as DPR with shared weights: passages of 156 tokens, 40 epochs.

The suffix is :bert, :distilbert, :condenser or :cocondenser. :ENCODER_cls is the paper's baseline: the dual encoder of
[CLS] with the same settings.
"""

from ml_collections import ConfigDict

from jaxret.configs.aggretriever import get_config as aggretriever
from jaxret.configs.base import one_stage as stages  # noqa: F401
from jaxret.configs.base import require_suffix
from jaxret.configs.recipes.aggretriever_msmarco import CHECKPOINTS as MSMARCO_CHECKPOINTS

CHECKPOINTS = {**MSMARCO_CHECKPOINTS, "cocondenser": "Luyu/co-condenser-wiki"}
SUFFIXES = (*CHECKPOINTS, *(f"{encoder}_cls" for encoder in CHECKPOINTS))


def get_config(system: str = "bert") -> ConfigDict:
    require_suffix("recipes/aggretriever_open_qa.py", system, SUFFIXES)
    encoder, _, kind = system.partition("_")
    config = aggretriever()
    config.encoder.checkpoint = CHECKPOINTS[encoder]
    if kind == "cls":
        config.head.name = "dual_encoder"
    config.optimizer.warmup_steps = 1237
    config.validation.best = "last"  # its trainer, Tevatron, has no dev set
    return config
