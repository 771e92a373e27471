"""What T5 changes in any family: no [CLS], so the mean over tokens stands for the text, and a larger learning rate.

Layers below the last come raw, as transformers gives them: encoder.normalize_intermediate=True makes them comparable.
"""

from ml_collections import ConfigDict

from configs.base import get_config as base


def use_t5(c: ConfigDict) -> ConfigDict:
    """Turns a BERT config into one of T5-base."""
    c.encoder.checkpoint = "t5-base"
    c.encoder.dtype = "bfloat16"
    c.encoder.normalize_intermediate = False
    c.head.token = "mean"
    c.optimizer.learning_rate = 5e-4
    return c


def get_config() -> ConfigDict:
    """The dual encoder on T5-base."""
    return use_t5(base())
