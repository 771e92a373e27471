"""Adapters in the files of the library PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from jaxret.models.encoders.architectures import ARCHITECTURES, EncoderConfig
from jaxret.models.lora import choose_layers, layer_numbers, linear_layers, matching_layers, module_names
from jaxret.storage.atomic import write_json
from jaxret.storage.foreign_files import read_settings, read_tensors, write_tensors
from jaxret.types import Params

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPORT = "jaxret.json"  # file of a jaxret export: the config of the run, with the digest of the base
WRAPPER = "base_model.model."  # PEFT's prefix of every tensor name
MATRICES = {"lora_a": "lora_A", "lora_b": "lora_B"}  # our matrices -> PEFT's, which are transposed

# Keys of adapter_config.json that change the computation -> the implemented values.
ADAPTER_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "init_lora_weights": (True, False, None, "gaussian"),  # with other values, PEFT changes the weights of the base
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication"), (None, [])),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "alora_invocation_tokens"), (None, [])),
}


def save_adapters(directory: Path, config: EncoderConfig, params: Mapping[str, Any], settings: Any, base: str) -> None:
    """Write the adapters of an encoder in PEFT's files.

    Args:
        directory: folder to write to.
        params: parameters of the encoder; only the adapters among them are written.
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
        for parameter, matrix in MATRICES.items():
            matrices = np.asarray(flat[f"{path}/{parameter}"], np.float32)
            for number in numbers:
                name = f"{WRAPPER}{module_names(tensor)[number - 1]}.{matrix}.weight"
                tensors[name] = matrices[number - 1].T
    write_tensors(directory / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
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
    write_json(directory / ADAPTER_CONFIG, content)


def target_modules(config: EncoderConfig, paths: Collection[str], numbers: Collection[int] = ()) -> list[str] | str:
    """Return PEFT's `target_modules` for dense layers.

    For all layers of the encoder, these are the shortest endings that no other name has, such as "q_proj" or
    "attention.output.dense". If a full name is the ending of another name, it is one regular expression. For some
    layers of the encoder, these are the full names.

    Args:
        paths: paths of the dense layers.
        numbers: numbers of the encoder's layers, from 1; (): all.
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
        possible_endings = (".".join(parts[-count:]) for count in range(1, len(parts)))
        ending = next((ending for ending in possible_endings if with_ending(ending) == {path}), ".".join(parts))
        if not with_ending(ending) <= set(paths):
            full_names = sorted(re.escape(names[path]).replace(r"\{\}", r"\d+") for path in paths)
            return rf"(?:.*\.)?(?:{'|'.join(full_names)})"
        endings.append(ending)
    return sorted(endings)


def load_adapters(directory: str | Path, config: EncoderConfig, settings: Any, ignore: Collection[str] = ()) -> Params:
    """Return the adapters in a PEFT directory as parameters of an encoder, on the host.

    Args:
        directory: folder with adapter_config.json and adapter_model.safetensors.
        settings: the config's group `lora`, which must equal adapter_config.json.
        ignore: name prefixes of modules that the encoder does not have; their adapters are left out.

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
        for parameter, matrix in MATRICES.items():
            stacked_array = np.zeros((config.num_layers, *reversed(sizes[parameter])), np.float32)
            for number in numbers:
                name = f"{module_names(tensor)[number - 1]}.{matrix}.weight"
                array = tensors.pop(name, None)
                if array is None:
                    problems.append(f"missing {name}")
                elif array.shape != sizes[parameter]:
                    problems.append(f"{name} has shape {array.shape}, the encoder needs {sizes[parameter]}")
                elif not np.isfinite(np.asarray(array, np.float32)).all():
                    problems.append(f"{name} holds a NaN or an infinity")
                else:
                    stacked_array[number - 1] = np.asarray(array, np.float32).T
            flat[f"{path}/{parameter}"] = stacked_array
    problems += [f"unused {name}" for name in sorted(tensors) if not name.startswith(tuple(ignore))]
    if problems:
        raise ValueError(f"{weights} does not fit the encoder and lora.targets: {'; '.join(problems[:8])}")
    return traverse_util.unflatten_dict(flat, sep="/")


def adapter_files(directory: str | Path) -> tuple[Path, Path]:
    """Return the paths of adapter_config.json and adapter_model.safetensors. Raises FileNotFoundError if one is
    missing."""
    directory = Path(directory)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            files = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
            raise FileNotFoundError(f"lora.adapters: {directory} has no {name} (it has {files})")
    return directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS


def require_adapters_base(directory: str | Path, settings: Any, base: str, digest: str) -> None:
    """Raise ValueError if adapters belong to another base. The base is compared by the digest of its weights, which
    jaxret's exports have, or else by its name in adapter_config.json.

    Args:
        directory: folder of the adapters.
        settings: the config's group `lora`, whose `base` is an accepted name of the base.
        base: name or directory of the encoder.
        digest: digest of the encoder's weights; "": digests are not compared.
    """
    config_path, _ = adapter_files(directory)
    adapters_base = read_settings(config_path).get("base_model_name_or_path")
    export_path = config_path.with_name(EXPORT)
    encoder = read_settings(export_path).get("encoder") if export_path.is_file() else None
    base_digest = encoder.get("sha256") if isinstance(encoder, dict) else None
    if base_digest and digest:
        if base_digest != digest:
            raise ValueError(
                f"lora.adapters: {directory} has adapters of {adapters_base!r} with SHA-256 {base_digest[:12]}... "
                f"({export_path.name}), but the weights of {base!r} have SHA-256 {digest[:12]}...; begin with the base "
                "of the adapters"
            )
        return
    if adapters_base and adapters_base != settings.base and _model_name(adapters_base) != _model_name(base):
        raise ValueError(
            f"lora.adapters: {config_path} has adapters of {adapters_base!r}, and this run begins with {base!r}. If "
            f"both are the same model, set lora.base={adapters_base!r}"
        )


def _model_name(name: str) -> str:
    """Return the last part of a model's name or path, or the model's name for a folder in the hub's cache."""
    parts = [part for part in re.split(r"[/\\]", str(name)) if part]
    cache_folder = next((part for part in parts if part.startswith("models--")), "")
    return (cache_folder.rpartition("--")[2] or (parts[-1] if parts else "")).lower()


def strip_prefix(name: str, config: EncoderConfig) -> str:
    """Return the name of a tensor without the prefixes of PEFT and of the model class. PEFT itself ignores names with
    the prefix of another class, so that the adapter would change nothing."""
    return name.removeprefix(WRAPPER).removeprefix(ARCHITECTURES[config.model_type].prefix)


def require_same_settings(path: Path, config: EncoderConfig, settings: Any, ignore: Collection[str] = ()) -> None:
    """Raise ValueError if an adapter_config.json has settings that are not implemented or differ from the config's.

    Args:
        path: path of adapter_config.json.
        settings: the config's group `lora`.
        ignore: name prefixes of modules that the encoder does not have.
    """
    raw = read_settings(path)
    for key, values in ADAPTER_ONLY.items():
        if key in raw and raw[key] not in values:
            raise ValueError(f"{path}: {key} is {raw[key]!r}; only {values[0]!r} is implemented")
    pairs = {
        "rank": (settings.rank, raw.get("r", 8)),
        "alpha": (settings.alpha, raw.get("lora_alpha", 8)),
        "rslora": (settings.rslora, bool(raw.get("use_rslora"))),
    }
    for key, (value, stored_value) in pairs.items():
        if value != stored_value:
            raise ValueError(f"lora.{key} is {value}, but {path} has {stored_value}: set lora.{key}={stored_value}")
    stored_layers = described_layers(path, raw, config, ignore)
    expected = layer_numbers(config, settings)
    if stored_layers.keys() != set(choose_layers(config, settings.targets)):
        modules = target_modules(
            config, [path for path in linear_layers(config) if path.partition("/")[2] in stored_layers]
        )
        names = (modules,) if isinstance(modules, str) else tuple(modules)
        raise ValueError(
            f"lora.targets is {tuple(settings.targets)}, but {path} has adapters of other layers: "
            f"set lora.targets={names}"
        )
    for name, numbers in stored_layers.items():
        if numbers != set(expected):
            layers = () if len(numbers) == config.num_layers else tuple(sorted(numbers))
            raise ValueError(
                f"lora.layers is {tuple(settings.layers)}, but {path} has adapters of {name!r} in layers "
                f"{', '.join(map(str, sorted(numbers)))} (from 1): set lora.layers={layers}"
            )


def described_layers(
    path: Path, raw: Mapping[str, Any], config: EncoderConfig, ignore: Collection[str]
) -> dict[str, set[int]]:
    """Return {path of a dense layer: numbers of the layers, from 1, with an adapter} of an adapter_config.json.

    Args:
        path: path of the file, for errors.
        raw: content of the file.
        ignore: name prefixes of modules that the encoder does not have.
    """
    modules, layers = raw.get("target_modules"), raw.get("layers_to_transform")
    targets = (
        [modules]
        if isinstance(modules, str)
        else [name for name in modules or [] if not name.startswith(tuple(ignore))]
    )
    numbers_by_path = matching_layers(config, targets, f"target_modules of {path}")
    if layers in (None, []) or isinstance(modules, str):  # with a regular expression, PEFT ignores layers_to_transform
        return numbers_by_path
    listed_numbers = {number + 1 for number in ([layers] if isinstance(layers, int) else layers)}
    return {name: numbers & listed_numbers for name, numbers in numbers_by_path.items() if numbers & listed_numbers}
