"""Heads: HiddenStates -> Embeddings, one file per family. `head.py` has the interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.encoders import sentence_transformers
from jaxret.models.encoders.dense_modules import read_dense_modules
from jaxret.models.encoders.protocol import ABILITIES, EncoderConfig
from jaxret.models.heads.aggretriever import AggretrieverHead
from jaxret.models.heads.colbert import ColbertHead
from jaxret.models.heads.dual_encoder import DualEncoderHead
from jaxret.models.heads.head import VectorHead
from jaxret.models.heads.i3 import I3Head
from jaxret.models.heads.me_bert import MeBertHead
from jaxret.models.heads.mlr import MlrHead
from jaxret.models.heads.mvr import MvrHead
from jaxret.models.heads.pylate import is_pylate, read_pylate_keys
from jaxret.models.heads.splade import SpladeHead

HEADS: dict[str, type[VectorHead]] = {
    "dual_encoder": DualEncoderHead,
    "mlr": MlrHead,
    "me_bert": MeBertHead,
    "colbert": ColbertHead,
    "mvr": MvrHead,
    "aggretriever": AggretrieverHead,
    "i3": I3Head,
    "splade": SpladeHead,
}


def make_head(config: ConfigDict, shapes: EncoderConfig) -> VectorHead:
    """Return the head that `config.head` names, with the keys of its group. Raises ValueError for an unknown name,
    invalid settings, and an encoder that lacks an ability."""
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
            advice = (
                "; set head.token='mean' or 'last'"
                if set(head.needs()) <= {"cls", "leading_tokens"} and need == "cls"
                else ""
            )
            raise ValueError(
                f"head.name is {name!r}, which {shapes.model_type} does not support: {shapes.lacks[need]}{advice}"
            )
    return head


def read_model_keys(root: Path) -> dict[str, Any]:
    """Return {config key: value} of the settings for texts and vectors in a model's directory. Raises ValueError with
    file and key for settings that are not supported."""
    if is_pylate(root):
        return read_pylate_keys(root)
    sizes = tuple(matrix.shape[1] for matrix in read_dense_modules(root))
    dense = {"head.dual_encoder.dense": sizes} if sizes else {}
    return {**sentence_transformers.read_sentence_transformers_keys(root), **dense}
