"""Heads: HiddenStates -> Embeddings, one file a family. `head.py` says what a head is to the rest of the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.encoders import sentence_transformers
from jaxret.models.encoders.protocol import ABILITIES, EncoderConfig
from jaxret.models.heads.all_tokens import AllTokens
from jaxret.models.heads.first_tokens import FirstTokens
from jaxret.models.heads.head import Head, Params
from jaxret.models.heads.implicit import ImplicitInteraction
from jaxret.models.heads.last_layer import LastLayer
from jaxret.models.heads.layers import Layers
from jaxret.models.heads.lexical import LexicalAggregate
from jaxret.models.heads.pylate import is_pylate, stored_head
from jaxret.models.heads.pylate import stated as stated_by_pylate
from jaxret.models.heads.viewers import Viewers

HEADS: dict[str, type[Head]] = {
    "last_layer": LastLayer,
    "layers": Layers,
    "first_tokens": FirstTokens,
    "all_tokens": AllTokens,
    "viewers": Viewers,
    "lexical": LexicalAggregate,
    "implicit": ImplicitInteraction,
}


def make_head(config: ConfigDict, shapes: EncoderConfig) -> Head:
    """The head that `config.head` names, with its own group of keys. Raises ValueError for an unknown name, settings
    that mean nothing, and an encoder that lacks what the family needs."""
    name = config.head.name
    if name not in HEADS:
        raise ValueError(f"head.name is {name!r}; it must be one of {', '.join(HEADS)}")
    group = config.head.get(name, ConfigDict())
    keys = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
    head = HEADS[name](
        num_layers=shapes.num_layers,
        hidden_size=shapes.hidden_size,
        vocab_size=shapes.vocab_size,
        token=config.head.token,
        **keys,
    )
    for need in head.needs():
        assert need in ABILITIES, need
        if need in shapes.lacks:
            advice = "; set head.token='mean'" if head.needs() == ("cls",) else ""
            raise ValueError(
                f"head.name is {name!r}, which {shapes.model_type} cannot have: {shapes.lacks[need]}{advice}"
            )
    return head


def stated(root: Path) -> dict[str, Any]:
    """What a model's directory says of texts and vectors, as keys of the config with their values; {} if nothing.
    Raises ValueError with file and key for what cannot be had here."""
    return stated_by_pylate(root) if is_pylate(root) else sentence_transformers.stated(root)


def stored_parameters(root: Path, head: Head) -> Params:
    """What a model's directory has for the parameters of a head; {} if nothing."""
    return stored_head(root) if head.STATED else {}
