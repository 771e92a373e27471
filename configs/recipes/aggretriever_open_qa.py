"""Aggretriever on open-domain question answering, as DPR with shared weights."""

from ml_collections import ConfigDict

from configs.aggretriever import get_config as aggretriever
from configs.base import one_stage as stages  # noqa: F401


def get_config() -> ConfigDict:
    c = aggretriever()
    c.optimizer.warmup_steps = 1237
    return c
