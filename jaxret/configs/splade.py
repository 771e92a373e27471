"""SPLADE: weights of the vocabulary's words, with expansion; suffix `doc` leaves queries as they are, without an encoder,
and `unicoil` weighs the words of the text alone."""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

SUFFIXES = ("max", "doc", "unicoil")


def get_config(variant: str = "max") -> ConfigDict:
    require_suffix("splade.py", variant, SUFFIXES)
    c = base()
    c.encoder.dtype = "bfloat16"
    c.encoder.tied = True
    c.head.name = "splade"
    c.head.splade.expansion = variant != "unicoil"
    c.head.splade.queries = "words" if variant == "doc" else "encoded"
    c.tokens.query_length = 32
    c.tokens.passage_length = 128
    if variant != "unicoil":
        c.loss.sparsity.query = 0.0 if variant == "doc" else 0.01
        c.loss.sparsity.passage = 0.01
        c.loss.sparsity.steps = 1000
    return c
