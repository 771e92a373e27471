"""The dual encoder on XLM-RoBERTa-base: a hundred languages."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def get_config() -> ConfigDict:
    c = base()
    c.encoder.checkpoint = "FacebookAI/xlm-roberta-base"
    c.encoder.dtype = "bfloat16"
    c.head.i3.mask_id = 250001
    return c
