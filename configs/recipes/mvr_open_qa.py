"""MVR on open-domain question answering, from BERT-base (:bert) or coCondenser (:cocondenser)."""

from typing import Any

from ml_collections import ConfigDict

from configs.base import one_stage, require_suffix, two_stages
from configs.mvr import get_config as mvr

CHECKPOINTS = {"bert": "bert-base-uncased", "cocondenser": "Luyu/co-condenser-wiki"}
SUFFIXES = tuple(CHECKPOINTS)


def stages(encoder: str = "bert") -> tuple[dict[str, Any], ...]:
    """The paper's tables from BERT are of one stage, those from coCondenser of two."""
    return one_stage() if encoder == "bert" else two_stages(depth=100, keep=100)


def get_config(encoder: str = "bert") -> ConfigDict:
    require_suffix("recipes/mvr_open_qa.py", encoder, SUFFIXES)
    c = mvr()
    c.encoder.checkpoint = CHECKPOINTS[encoder]
    c.optimizer.warmup_steps = 1237  # as DPR
    return c
