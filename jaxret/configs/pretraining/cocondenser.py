"""coCondenser (Gao & Callan 2022), from Condenser: about 2,048 spans of 1,024 documents a batch, in chunks."""

from ml_collections import ConfigDict

from jaxret.configs.pretraining.condenser import get_config as condenser


def get_config() -> ConfigDict:
    c = condenser()
    c.encoder.checkpoint = "Luyu/condenser"
    c.pretraining.method = "cocondenser"
    c.pretraining.length = 128
    c.train.batch_size = 1024
    c.train.chunk_size = 256
    return c
