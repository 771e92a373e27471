"""Aggretriever on MS MARCO's official corpus (no titles): 8 queries per step with 7 BM25 negatives each, 3 epochs.

The suffix is :bert, :distilbert, :condenser or :cocondenser. :ENCODER_cls is the paper's baseline: the dual encoder of
[CLS] with the same settings. :distilbert_hard trains two more epochs from the first stage, on negatives sampled from
the 200 best passages of that model (table 6).
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.aggretriever import get_config as aggretriever
from jaxret.configs.base import one_stage, require_suffix

CHECKPOINTS = {
    "bert": "bert-base-uncased",
    "distilbert": "distilbert-base-uncased",
    "condenser": "Luyu/condenser",
    "cocondenser": "Luyu/co-condenser-marco",
}
SUFFIXES = (*CHECKPOINTS, *(f"{encoder}_cls" for encoder in CHECKPOINTS), "distilbert_hard")


def stages(system: str = "bert") -> tuple[dict[str, Any], ...]:
    if system != "distilbert_hard":
        return one_stage()
    mining = {"pools": ("stage1",), "depth": 200, "keep": 200, "draw": "sample"}
    further = {"train.start_from": "stage1", "train.epochs": 2.0}
    return ({"name": "stage1"}, {"name": "stage2", "mine": mining, "config": further})


def get_config(system: str = "bert") -> ConfigDict:
    require_suffix("recipes/aggretriever_msmarco.py", system, SUFFIXES)
    encoder, _, kind = system.partition("_")
    config = aggretriever()
    config.encoder.checkpoint = CHECKPOINTS[encoder]
    if kind == "cls":
        config.head.name = "dual_encoder"
    config.tokens.passage_length = 128
    config.tokens.title_separator = " "  # the corpus has no titles; the paper's code joins BEIR's titles by a space
    config.data.negatives = 7
    config.optimizer.learning_rate = 5e-6
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.clip_norm = 1.0
    config.train.batch_size = 8
    config.train.epochs = 3.0
    config.validation.best = "last"  # its trainer, Tevatron, has no dev set
    return config
