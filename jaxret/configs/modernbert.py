"""The dual encoder on ModernBERT-base: texts of up to 8,192 tokens; most layers have local attention."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.checkpoint = "answerdotai/ModernBERT-base"
    config.encoder.dtype = "bfloat16"
    config.tokens.passage_length = 512
    config.optimizer.learning_rate = 5e-5
    config.train.chunk_size = 64
    return config
