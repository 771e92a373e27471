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
from jaxret.models.lora import (
    choose_layers,
    layer_numbers,
    linear_layers,
    matching_layers,
    module_names,
)
from jaxret.storage.atomic import atomic_write, write_json
from jaxret.storage.foreign_files import read_settings, read_tensors
from jaxret.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPORT = "jaxret.json"  # beside them in exports of jaxret: the config of the run, with the digest of the base
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
    **dict.fromkeys(("modules_to_save", "layer_replication"), (None, [])),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "alora_invocation_tokens"), (None, [])),
}


def save_adapters(directory: Path, config: EncoderConfig, params: Mapping[str, Any], settings: Any, base: str) -> None:
    """Write the adapters of an encoder as PEFT does.

    Args:
        directory: folder to write to.
        params: of the encoder; the adapters among them are written.
        settings: the config's group `lora`.
        base: name or directory of the model that the adapters belong to.
    """
    flat = traverse_util.flatten_dict(dict(params), sep="/")
    numbers = layer_numbers(config, settings)
    tensors: dict[str, np.ndarray] = {}
    paths: list[str] = []
    for path, tensor in linear_layers(config).items():
        if f"{path}/lora_a" not in flat:
            continue
        paths.append(path)
        for ours, theirs in MATRICES.items():
            matrices = np.asarray(flat[f"{path}/{ours}"], np.float32)
            for number in numbers:
                name = f"{WRAPPER}{module_names(tensor)[number - 1]}.{theirs}.weight"
                tensors[name] = np.ascontiguousarray(matrices[number - 1].T)
    with atomic_write(directory / WEIGHTS, "wb") as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    content = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": target_modules(config, paths, numbers),
        "bias": "none",
    }
    write_json(directory / CONFIG, content)


def target_modules(config: EncoderConfig, paths: Collection[str], numbers: Collection[int] = ()) -> list[str] | str:
    """Return PEFT's `target_modules` of dense layers: the shortest endings that no other layer's name has, such as
    "q_proj" or "attention.output.dense"; or, where a layer's whole name ends another's, a regular expression of all.
    Of some layers of the encoder, the whole names in these.

    Args:
        paths: of the dense layers.
        numbers: of the encoder's layers, from 1; (): all.
    """
    if 0 < len(numbers) < config.num_layers:
        modules = [module_names(tensor) for path, tensor in linear_layers(config).items() if path in paths]
        return sorted(names[number - 1] for names in modules for number in numbers)
    names = {path: ARCHITECTURES[config.model_type].names(config)[path] for path in linear_layers(config)}

    def with_ending(ending: str) -> set[str]:
        return {path for path, name in names.items() if f".{name}".endswith(f".{ending}")}

    endings: list[str] = []
    for path in paths:
        parts = names[path].split("{}.")[1].split(".")
        own = (".".join(parts[-count:]) for count in range(1, len(parts)))
        ending = next((ending for ending in own if with_ending(ending) == {path}), ".".join(parts))
        if not with_ending(ending) <= set(paths):
            wholes = sorted(re.escape(names[path]).replace(r"\{\}", r"\d+") for path in paths)
            return rf"(?:.*\.)?(?:{'|'.join(wholes)})"
        endings.append(ending)
    return sorted(endings)


def load_adapters(directory: str | Path, config: EncoderConfig, settings: Any, ignore: Collection[str] = ()) -> Params:
    """Return the adapters in a directory of PEFT's, on the host, as part of an encoder's parameters.

    Args:
        directory: with adapter_config.json and adapter_model.safetensors.
        settings: the config's group `lora`, which must have the same values.
        ignore: name prefixes of modules that the encoder has not, whose adapters are left out.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapters are of a kind that is not implemented, or do not fit the encoder or the settings.
    """
    config_path, weights = adapter_files(directory)
    require_same_settings(config_path, config, settings, ignore)
    tensors = {strip_prefix(name, config): array for name, array in read_tensors(weights).items()}
    paths, numbers = set(choose_layers(config, settings.targets)), layer_numbers(config, settings)
    flat: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for path, tensor in linear_layers(config).items():
        if path.partition("/")[2] not in paths:
            continue
        sizes = {"lora_a": (settings.rank, tensor.shape[1]), "lora_b": (tensor.shape[0], settings.rank)}
        for ours, theirs in MATRICES.items():
            whole = np.zeros((config.num_layers, *reversed(sizes[ours])), np.float32)
            for number in numbers:
                name = f"{module_names(tensor)[number - 1]}.{theirs}.weight"
                array = tensors.pop(name, None)
                if array is None:
                    problems.append(f"missing {name}")
                elif array.shape != sizes[ours]:
                    problems.append(f"{name} has shape {array.shape}, the encoder asks for {sizes[ours]}")
                elif not np.isfinite(np.asarray(array, np.float32)).all():
                    problems.append(f"{name} holds a NaN or an infinity")
                else:
                    whole[number - 1] = np.asarray(array, np.float32).T
            flat[f"{path}/{ours}"] = whole
    problems += [f"unused {name}" for name in sorted(tensors) if not name.startswith(tuple(ignore))]
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


def require_adapters_base(directory: str | Path, settings: Any, base: str, digest: str) -> None:
    """Raise ValueError if adapters belong to another base: by the digest of its weights, which jaxret's exports have,
    or by its name in adapter_config.json.

    Args:
        directory: of the adapters.
        settings: the config's group `lora`; `base` there is the name that is right.
        base: name or directory of the encoder.
        digest: of its weights; "": it is not compared.
    """
    config_path, _ = adapter_files(directory)
    raw, own = read_settings(config_path), config_path.with_name(EXPORT)
    theirs = raw.get("base_model_name_or_path") if isinstance(raw, dict) else None
    export = read_settings(own) if own.is_file() else {}
    encoder = export.get("encoder") if isinstance(export, dict) else None
    own_digest = encoder.get("sha256") if isinstance(encoder, dict) else None
    if own_digest and digest:
        if own_digest != digest:
            raise ValueError(
                f"lora.adapters: {directory} has adapters of {theirs!r} with weights of SHA-256 {own_digest[:12]}... "
                f"({own.name}), and those of {base!r} have {digest[:12]}...; begin with the base of the adapters"
            )
        return
    if theirs and theirs != settings.base and _model_name(theirs) != _model_name(base):
        raise ValueError(
            f"lora.adapters: {config_path} has adapters of {theirs!r}, and this run begins with {base!r}; if both are "
            f"the same model, set lora.base={theirs!r}"
        )


def _model_name(name: str) -> str:
    """Return the last part of a model's name or path; of a folder in the hub's cache, the name of the model."""
    parts = [part for part in re.split(r"[/\\]", str(name)) if part]
    cache_folder = next((part for part in parts if part.startswith("models--")), "")
    return (cache_folder.rpartition("--")[2] or (parts[-1] if parts else "")).lower()


def strip_prefix(name: str, config: EncoderConfig) -> str:
    """Return the name of a tensor without the prefixes of PEFT and of the class that it wrapped: PEFT itself ignores
    names with another class's prefix, and the adapter then changes nothing."""
    return name.removeprefix(WRAPPER).removeprefix(ARCHITECTURES[config.model_type].prefix)


def require_same_settings(path: Path, config: EncoderConfig, settings: Any, ignore: Collection[str] = ()) -> None:
    """Raise ValueError unless an adapter_config.json is implemented and equals the config's group `lora`.

    Args:
        settings: the config's group `lora`.
        ignore: name prefixes of modules that the encoder has not.
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
    theirs = described_layers(path, raw, config, ignore)
    expected = layer_numbers(config, settings)
    if theirs.keys() != set(choose_layers(config, settings.targets)):
        modules = target_modules(config, [path for path in linear_layers(config) if path.partition("/")[2] in theirs])
        names = (modules,) if isinstance(modules, str) else tuple(modules)
        raise ValueError(
            f"lora.targets is {tuple(settings.targets)}, but {path} has adapters of others: set lora.targets={names}"
        )
    for name, numbers in theirs.items():
        if numbers != set(expected):
            layers = () if len(numbers) == config.num_layers else tuple(sorted(numbers))
            raise ValueError(
                f"lora.layers is {tuple(settings.layers)}, but {path} has adapters of {name!r} in layers "
                f"{', '.join(map(str, sorted(numbers)))} (from 1): set lora.layers={layers}"
            )


def described_layers(
    path: Path, raw: Mapping[str, Any], config: EncoderConfig, ignore: Collection[str]
) -> dict[str, set[int]]:
    """Return what `matching_layers` returns, for the content of an adapter_config.json.

    Args:
        path: of the file, for errors.
        raw: its content.
        ignore: name prefixes of modules that the encoder has not.
    """
    modules, layers = raw.get("target_modules"), raw.get("layers_to_transform")
    targets = (
        [modules]
        if isinstance(modules, str)
        else [name for name in modules or [] if not name.startswith(tuple(ignore))]
    )
    numbers_by_path = matching_layers(config, targets, f"target_modules of {path}")
    if layers in (None, []) or isinstance(modules, str):  # PEFT reads no layers beside a regular expression
        return numbers_by_path
    own_numbers = {number + 1 for number in ([layers] if isinstance(layers, int) else layers)}
    return {name: numbers & own_numbers for name, numbers in numbers_by_path.items() if numbers & own_numbers}
