"""Qwen3-0.6B, a language model, in full: the dual encoder at the last token, or MLR with an intermediate layer.

With the instruction of Qwen3-Embedding. The layers of MLR are at two thirds of the depth, as in the evidence that
middle layers of language models are good, or at 83 %, as in the BERT of MLR; no paper has trained either.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

LAYERS = {"mlr_18": (18, 28), "mlr_23": (23, 28)}
SUFFIXES = ("last", *LAYERS)


def get_config(suffix: str) -> ConfigDict:
    require_suffix("qwen3.py", suffix, SUFFIXES)
    c = base()
    c.encoder.checkpoint = "Qwen/Qwen3-0.6B-Base"
    c.encoder.tied = True
    c.encoder.dtype = "bfloat16"
    c.encoder.recompute = "layer"
    c.head.token = "last"
    c.normalize = True
    c.loss.temperature = 0.02
    c.tokens.prompts = "qwen3"
    c.tokens.title_separator = " "
    c.tokens.query_length = 64
    c.tokens.passage_length = 156
    c.data.negatives = 7
    c.train.batch_size = 32
    c.optimizer.learning_rate = 1e-5
    if suffix in LAYERS:
        c.head.name = "mlr"
        c.head.mlr.chosen = LAYERS[suffix]
        c.pooling = "self_contrastive"
        c.loss.local_weight = 1.0
    return c
