"""Adapters in files of the library PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from safetensors.numpy import save

from jaxret.models.encoders.architectures import ARCHITECTURES, EncoderConfig
from jaxret.models.encoders.lora import choose_layers, linear_layers, module_names
from jaxret.models.model import Params
from jaxret.storage.atomic import atomic_write, write_json
from jaxret.storage.foreign_files import read_settings, read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPER = "base_model.model."  # PEFT's prefix of every name
MATRICES = {"lora_a": "lora_A", "lora_b": "lora_B"}  # ours, [in, rank] and [rank, out] -> PEFT's, transposed

# Keys of adapter_config.json that change the computation, with the values that are implemented.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "init_lora_weights": (True, False, None, "gaussian"),  # others change the base
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication"), (None, [])),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "alora_invocation_tokens"), (None, [])),
}


def save_adapters(directory: Path, config: EncoderConfig, params: Mapping[str, Any], settings: Any, base: str) -> None:
    """Write the adapters of an encoder as PEFT does.

    Args:
      directory: folder to write to.
      config: of the encoder.
      params: of the encoder; the adapters among them are written.
      settings: the config's group `lora`.
      base: name or directory of the model that the adapters belong to.
    """
    flat = traverse_util.flatten_dict(dict(params), sep="/")
    tensors: dict[str, np.ndarray] = {}
    chosen: list[str] = []
    for path, tensor in linear_layers(config).items():
        if f"{path}/lora_a" not in flat:
            continue
        chosen.append(path)
        for ours, theirs in MATRICES.items():
            for name, matrix in zip(module_names(tensor), np.asarray(flat[f"{path}/{ours}"], np.float32), strict=True):
                tensors[f"{WRAPPER}{name}.{theirs}.weight"] = np.ascontiguousarray(matrix.T)
    with atomic_write(directory / WEIGHTS, "wb") as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    described = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": target_modules(config, chosen),
        "bias": "none",
    }
    write_json(directory / CONFIG, described)


def target_modules(config: EncoderConfig, chosen: Collection[str]) -> list[str] | str:
    """Return PEFT's `target_modules` of dense layers: the shortest endings that no other layer's name has, such as
    "q_proj" or "attention.output.dense"; or, where a layer's whole name ends another's, a regular expression of all.

    Args:
      config: of the encoder.
      chosen: paths of the layers.
    """
    names = {path: ARCHITECTURES[config.model_type].names(config)[path] for path in linear_layers(config)}

    def with_ending(ending: str) -> set[str]:
        return {path for path, name in names.items() if f".{name}".endswith(f".{ending}")}

    endings: list[str] = []
    for path in chosen:
        parts = names[path].split("{}.")[1].split(".")
        own = (".".join(parts[-count:]) for count in range(1, len(parts)))
        ending = next((ending for ending in own if with_ending(ending) == {path}), ".".join(parts))
        if not with_ending(ending) <= set(chosen):
            wholes = sorted(re.escape(names[path]).replace(r"\{\}", r"\d+") for path in chosen)
            return rf"(?:.*\.)?(?:{'|'.join(wholes)})"
        endings.append(ending)
    return sorted(endings)


def load_adapters(directory: str | Path, config: EncoderConfig, settings: Any) -> Params:
    """Return the adapters in a directory of PEFT's, on the host, as part of an encoder's parameters.

    Args:
      directory: with adapter_config.json and adapter_model.safetensors.
      config: of the encoder.
      settings: the config's group `lora`, which must say the same.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the adapters are of a kind that is not implemented, or do not fit the encoder or the settings.
    """
    described, weights = adapter_files(directory)
    require_same_settings(described, config, settings)
    tensors = {strip_prefix(name, config): array for name, array in read_tensors(weights).items()}
    chosen = set(choose_layers(config, settings.targets))
    flat: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for path, tensor in linear_layers(config).items():
        if path.partition("/")[2] not in chosen:
            continue
        sizes = {"lora_a": (settings.rank, tensor.shape[1]), "lora_b": (tensor.shape[0], settings.rank)}
        for ours, theirs in MATRICES.items():
            names = [f"{name}.{theirs}.weight" for name in module_names(tensor)]
            problems += [f"missing {name}" for name in names if name not in tensors]
            arrays = [tensors.pop(name) for name in names if name in tensors]
            for name, array in zip(names, arrays, strict=False):
                if array.shape != sizes[ours]:
                    problems.append(f"{name} has shape {array.shape}, the encoder asks for {sizes[ours]}")
            if not problems:
                flat[f"{path}/{ours}"] = np.stack([np.asarray(array, np.float32).T for array in arrays])
    problems += [f"unused {name}" for name in sorted(tensors)]
    if problems:
        raise ValueError(f"{weights} does not fit the encoder and lora.targets: {'; '.join(problems[:8])}")
    return traverse_util.unflatten_dict(flat, sep="/")


def adapter_files(directory: str | Path) -> tuple[Path, Path]:
    """Return adapter_config.json and adapter_model.safetensors of a directory of PEFT's. Raises FileNotFoundError."""
    directory = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            files = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
            raise FileNotFoundError(f"lora.adapters: {directory} has no {name} (it has {files})")
    return directory / CONFIG, directory / WEIGHTS


def strip_prefix(name: str, config: EncoderConfig) -> str:
    """Return the name of a tensor without the prefixes of PEFT and of the class that it wrapped: PEFT itself ignores
    names with another class's prefix, and the adapter then changes nothing."""
    return name.removeprefix(WRAPPER).removeprefix(ARCHITECTURES[config.model_type].prefix)


def require_same_settings(path: Path, config: EncoderConfig, settings: Any) -> None:
    """Raise ValueError unless an adapter_config.json is implemented and says the same as the config's group `lora`.

    Args:
      path: of the file.
      config: of the encoder.
      settings: the config's group `lora`.
    """
    raw = read_settings(path)
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: a JSON object is needed, found {type(raw).__name__}")
    for key, values in ONLY.items():
        if key in raw and raw[key] not in values:
            raise ValueError(f"{path}: {key} is {raw[key]!r}; only {values[0]!r} is implemented")
    pairs = {
        "rank": (settings.rank, raw.get("r", 8)),
        "alpha": (settings.alpha, raw.get("lora_alpha", 8)),
        "rslora": (settings.rslora, bool(raw.get("use_rslora"))),
    }
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(f"lora.{key} is {ours}, but {path} has {theirs}: set lora.{key}={theirs}")
    targets = raw.get("target_modules")
    targets = [targets] if isinstance(targets, str) else targets or []
    theirs = choose_layers(config, targets, f"target_modules of {path}")
    if set(theirs) != set(choose_layers(config, settings.targets)):
        raise ValueError(
            f"lora.targets is {tuple(settings.targets)}, but target_modules of {path} is {targets}: "
            f"set lora.targets={tuple(targets)}"
        )
