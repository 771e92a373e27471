"""The table of encoder architectures; configs and tensor names of their Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxret.models.encoders.architectures import (
    bert,
    decoder,
    distilbert,
    gemma3,
    llama,
    modernbert,
    roberta,
    t5,
    xlm_roberta,
)
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.protocol import EncoderConfig as EncoderConfig  # other modules import this name from here
from jaxret.models.encoders.stored import Architecture
from jaxret.models.encoders.weight_files import has_weights, weight_shapes
from jaxret.storage.foreign_files import read_settings
from jaxret.types import Tokens

ARCHITECTURES: dict[str, Architecture] = {
    "bert": bert.ARCHITECTURE,
    "distilbert": distilbert.ARCHITECTURE,
    "gemma3_text": gemma3.GEMMA3_ARCHITECTURE,
    "llama": llama.LLAMA_ARCHITECTURE,
    "mistral": llama.MISTRAL_ARCHITECTURE,
    "modernbert": modernbert.ARCHITECTURE,
    "qwen3": llama.QWEN3_ARCHITECTURE,
    "roberta": roberta.ARCHITECTURE,
    "t5": t5.ARCHITECTURE,
    "xlm-roberta": xlm_roberta.ARCHITECTURE,
}
# Fields of configs that are axes of stored tensors; a field that a config lacks is skipped.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_size")
_TABLES = ("max_positions", "type_vocab_size")  # axes of BERT's tables; encoders that rotate positions store no table
_MOST_LABELS = 100_000  # labels of a classifier; jaxret does not read them, but transformers makes a table of them
_SUFFIXES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}


def read_config(directory: str | Path) -> EncoderConfig:
    """Return the encoder's config in a directory's config.json. Raises ValueError with the key for an architecture or
    an option that is not implemented, and for invalid values."""
    path = Path(directory) / "config.json"
    raw = read_settings(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type is {kind!r}; it must be one of {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[kind]
    try:
        config = architecture.read(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (TypeError, AttributeError) as error:  # such as a list in place of a number
        raise ValueError(f"{path}: a value has a wrong type ({error})") from error
    require_usable_by_transformers(raw, config, path)
    if has_weights(Path(directory)):
        require_stored_sizes(config, architecture, path, weight_shapes(directory))
    return config


def is_language_model(config: EncoderConfig) -> bool:
    """Return whether an encoder is a language model. The special tokens around its texts are those of tokenizer.json,
    not [CLS] and [SEP]."""
    return isinstance(config, decoder.DecoderConfig)


def require_usable_by_transformers(raw: Mapping[str, Any], config: EncoderConfig, path: Path) -> None:
    """Raise ValueError for a value that only transformers reads, and that would make it use gigabytes or raise an
    obscure error. Vectors are compared with those of transformers.

    Args:
        raw: content of config.json.
        config: the config that was read from `raw`.
        path: path of config.json, for the error.
    """
    number, labels, pad = raw.get("num_labels", 2), raw.get("id2label") or {}, raw.get("pad_token_id")
    if type(number) is not int or not 0 <= number <= _MOST_LABELS:
        raise ValueError(f"{path}: num_labels is {number!r}; it must be a whole number from 0 to {_MOST_LABELS:,}")
    if not isinstance(labels, dict) or not all(str(key).isdecimal() for key in labels):
        raise ValueError(f"{path}: id2label is {str(labels)[:60]!r}; it must be an object with numbers as keys")
    if pad is not None and not (type(pad) is int and -config.vocab_size <= pad < config.vocab_size):
        raise ValueError(f"{path}: pad_token_id is {pad!r}; it must be an id below vocab_size, {config.vocab_size:,}")


def require_stored_sizes(
    config: EncoderConfig, architecture: Architecture, path: Path, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise ValueError if a config has more layers than tensors are stored, or a size above every stored axis. Such a
    config would use all memory: a name and a shape for each of its parameters are made before a file is compared.

    Args:
        config: content of config.json.
        architecture: architecture of the config.
        path: path of config.json, for the error.
        shapes: shapes of the stored tensors, by name.
    """
    sizes = _SIZES + (_TABLES if isinstance(config, bert.BertConfig) else ())
    largest = max((max(shape, default=1) for shape in shapes.values()), default=0)
    for field, limit, noun in (
        ("num_layers", len(shapes), "tensors"),
        *((field, largest, "as its largest axis") for field in sizes),
    ):
        if (value := getattr(config, field, 0)) > limit:
            key = architecture.keys[field].name
            raise ValueError(f"{path}: {key} is {value:,}, but model.safetensors next to it has {limit:,} {noun}")


def make_encoder(config: EncoderConfig, compute: Compute = Compute()) -> nn.Module:
    """Return the encoder of a config (a protocol.Encoder)."""
    return ARCHITECTURES[config.model_type].module(config, compute)


class StoredTensors(NamedTuple):
    """The stored tensors of a parameter. Kernels are stored transposed, [out, in]."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # shape of each tensor
    stacked: bool  # whether there is a tensor for each layer


def stored_tensors(config: EncoderConfig) -> dict[str, StoredTensors]:
    """Return {parameter path: stored tensors} for an encoder."""
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    shapes = jax.eval_shape(make_encoder(config).init, jax.random.key(0), tokens)["params"]
    return match_tensors(shapes, ARCHITECTURES[config.model_type].names(config), config.num_layers)


def match_tensors(params: Any, names: Mapping[str, str], num_layers: int) -> dict[str, StoredTensors]:
    """Return {parameter path: stored tensors} for parameters, or their shapes, and the names of
    `Architecture.names`."""
    tensors = {}
    for path, leaf in traverse_util.flatten_dict(params, sep="/").items():
        parent, _, suffix = path.rpartition("/")
        name = names[path] if path in names else f"{names[parent]}.{_SUFFIXES[suffix]}"
        stacked = "{}" in name
        shape = leaf.shape[1:] if stacked else leaf.shape
        layers = range(num_layers - leaf.shape[0], num_layers) if stacked else range(1)
        shape = shape[::-1] if suffix == "kernel" else shape
        tensors[path] = StoredTensors(tuple(name.format(i) for i in layers), shape, stacked)
    return tensors
