"""T5 in any family: the mean over tokens represents a text, because T5 has no [CLS]; the learning rate is larger.

States below the last layer have no norm, as in transformers; encoder.normalize_intermediate=True adds it.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def use_t5(config: ConfigDict) -> ConfigDict:
    """Change a config of BERT to T5-base."""
    config.encoder.checkpoint = "t5-base"
    config.encoder.dtype = "bfloat16"
    config.encoder.normalize_intermediate = False
    config.head.token = "mean"
    config.optimizer.learning_rate = 5e-4
    return config


def get_config() -> ConfigDict:
    """Return the dual encoder on T5-base."""
    return use_t5(base())
