"""MLR on MS MARCO passages: RetroMAE, 15 negatives per query, two equal stages of 4 epochs, the last checkpoint.

Queries have 32 tokens and passages 128, the values of the paper's code. :paper_lengths has 256 for both (appendix A).
The baselines are :dual_encoder from the same encoder, and from BERT-base :bert_dual_encoder, :bert_me_bert and
:bert_colbert (late interaction, as colbert.py:late). The code reads passages with titles: train in a folder with
collection.splitTitle.tsv.
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs import base, colbert, me_bert, mlr
from jaxret.configs.base import require_suffix, two_stages

FAMILIES = {"dual_encoder": base, "me_bert": me_bert}
SUFFIXES = ("mlr", "paper_lengths", "dual_encoder", *(f"bert_{family}" for family in (*FAMILIES, "colbert")))


def stages(system: str = "mlr") -> tuple[dict[str, Any], ...]:
    """Return two stages. Negatives are the first 100 of 1,000 candidates, without passages that are judged relevant."""
    return two_stages(depth=1000, keep=100, draw="top")


def get_config(system: str = "mlr") -> ConfigDict:
    require_suffix("recipes/mlr_msmarco.py", system, SUFFIXES)
    family = system.removeprefix("bert_")
    config = colbert.get_config("late") if family == "colbert" else FAMILIES.get(family, mlr).get_config()
    config.encoder.dtype = "bfloat16"
    if not system.startswith("bert_"):
        config.encoder.checkpoint = "Shitao/RetroMAE_MSMARCO"
    if system != "paper_lengths":
        config.tokens.query_length = 32
        config.tokens.passage_length = 128
    config.data.negatives = 15
    config.train.chunk_size = 32
    if config.head.name == "mlr":
        config.loss.local_weight = 0.01
    if config.head.name == "me_bert":  # other papers' tables evaluate ME-BERT with all its vectors
        config.pooling, config.loss.local_weight = "none", 0.0
    config.optimizer.learning_rate = 1e-5
    config.train.epochs = 4.0
    config.validation.best = "last"
    return config
