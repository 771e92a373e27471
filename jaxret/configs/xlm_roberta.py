"""The dual encoder on XLM-RoBERTa-base: a hundred languages."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    config = base()
    config.encoder.checkpoint = "FacebookAI/xlm-roberta-base"
    config.encoder.dtype = "bfloat16"
    config.head.i3.mask_id = 250001
    return config
