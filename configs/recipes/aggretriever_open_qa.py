"""Aggretriever on open-domain question answering, as DPR with shared weights."""

from ml_collections import ConfigDict

from configs.aggretriever import get_config as aggretriever


def get_config() -> ConfigDict:
    c = aggretriever()
    c.optimizer.warmup_steps = 1237
    return c
