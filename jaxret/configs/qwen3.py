"""Qwen3-0.6B, a language model, trained without LoRA: the dual encoder at the last token, or MLR with one more layer.

Queries have the instruction of Qwen3-Embedding. The added layer of MLR is at two thirds of the depth, where layers of
untrained language models are good, or at 83 %, as in MLR's BERT. No paper has trained either.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

LAYERS = {"mlr_18": (18, 28), "mlr_23": (23, 28)}
SUFFIXES = ("last", *LAYERS)


def get_config(suffix: str) -> ConfigDict:
    require_suffix("qwen3.py", suffix, SUFFIXES)
    config = base()
    config.encoder.checkpoint = "Qwen/Qwen3-0.6B-Base"
    config.encoder.tied = True
    config.encoder.dtype = "bfloat16"
    config.encoder.recompute = "layer"
    config.head.token = "last"
    config.normalize = True
    config.loss.temperature = 0.02
    config.tokens.prompts = "qwen3"
    config.tokens.title_separator = " "
    config.tokens.query_length = 64
    config.tokens.passage_length = 156
    config.data.negatives = 7
    config.train.batch_size = 32
    config.optimizer.learning_rate = 1e-5
    if suffix in LAYERS:
        config.head.name = "mlr"
        config.head.mlr.chosen = LAYERS[suffix]
        config.pooling = "self_contrastive"
        config.loss.local_weight = 1.0
    return config
