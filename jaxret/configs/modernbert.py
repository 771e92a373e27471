"""The dual encoder on ModernBERT-base: texts of up to 8,192 tokens, most layers with local attention."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.encoder.checkpoint = "answerdotai/ModernBERT-base"
    c.encoder.dtype = "bfloat16"
    c.tokens.passage_length = 512
    c.optimizer.learning_rate = 5e-5
    c.train.chunk_size = 64
    return c
