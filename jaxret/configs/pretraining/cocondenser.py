"""coCondenser (Gao & Callan 2022), from Condenser: about 2,048 spans of 1,024 documents a batch, in chunks."""

from ml_collections import ConfigDict

from jaxret.configs.pretraining.condenser import get_config as condenser


def get_config() -> ConfigDict:
    config = condenser()
    config.encoder.checkpoint = "Luyu/condenser"
    config.pretraining.method = "cocondenser"
    config.pretraining.length = 128
    config.train.batch_size = 1024
    config.train.chunk_size = 256
    return config
