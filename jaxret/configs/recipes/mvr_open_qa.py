"""MVR on open-domain question answering, from BERT-base (:bert) or coCondenser (:cocondenser), one encoder for both sides.

The paper names "the same BERT encoder" (3.1), but its models are built on DPR's code, which has two encoders:
:bert_two_encoders. :cocondenser_dual_encoder is the paper's reproduction of coCondenser (table 1).
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import one_stage, require_suffix
from jaxret.configs.mvr import get_config as mvr

CHECKPOINTS = {"bert": "bert-base-uncased", "cocondenser": "Luyu/co-condenser-wiki"}
SUFFIXES = (*CHECKPOINTS, "bert_two_encoders", "cocondenser_dual_encoder")


def stages(system: str = "bert") -> tuple[dict[str, Any], ...]:
    """Return one stage for the paper's tables with BERT, and two for those with coCondenser. The second stage trains on
    the records of the first and on as many records with mined negatives."""
    if system.startswith("bert"):
        return one_stage()
    mining = {"pools": ["stage1"], "concat": ["data"], "depth": 100, "keep": 100}
    return ({"name": "stage1"}, {"name": "stage2", "mine": mining})


def get_config(system: str = "bert") -> ConfigDict:
    require_suffix("recipes/mvr_open_qa.py", system, SUFFIXES)
    encoder, _, kind = system.partition("_")
    config = mvr()
    config.encoder.checkpoint = CHECKPOINTS[encoder]
    config.encoder.tied = kind != "two_encoders"
    if kind == "dual_encoder":
        config.head.name, config.loss.local_weight, config.loss.annealing_rate = "dual_encoder", 0.0, 0.0
    config.optimizer.warmup_steps = 1237  # as in DPR
    config.validation.metric, config.validation.then = "nll", "average_rank"
    config.validation.then_from = 31.0  # as in DPR: from the end of epoch 30, counted from 0
    return config
