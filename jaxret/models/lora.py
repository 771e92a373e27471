"""Low-rank adapters (LoRA, Hu et al. 2021), with the names, the start and the arithmetic of the library PEFT.

A dense layer with an adapter computes x W + b + scaling * drop(x) A B. W and b belong to the base and are frozen. A
[in, rank] starts uniform in +-1/sqrt(in), B [rank, out] starts at zero. scaling is alpha / rank, or alpha / sqrt(rank)
with rank stabilization (rsLoRA, Kalajdzievski 2023). Models have adapters only during training: opening a run adds
scaling * A B to W.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxret.models.encoders.architectures import EncoderConfig, StoredTensors, stored_tensors
from jaxret.models.encoders.layers import Adapters
from jaxret.models.model import ModelT
from jaxret.parallel.mesh import LAYER_PATH, path_name
from jaxret.types import Params

ADAPTER = r"encoder/.*/lora_[ab]$"  # matches the paths of adapters
BASE = r"encoder/(?!.*/lora_[ab]$)"  # matches the paths of the base's parameters
ALL_LINEAR = "all-linear"
BASE_DTYPES = ("bfloat16", "float32")
KERNEL = "/kernel"


def linear_layers(config: EncoderConfig) -> dict[str, StoredTensors]:
    """Return {path of a dense layer: stored tensors of its kernel} for the dense layers inside an encoder's layers."""
    tensors = stored_tensors(config)
    return {
        path.removesuffix(KERNEL): tensor
        for path, tensor in tensors.items()
        if path.endswith(KERNEL) and tensor.stacked and re.match(LAYER_PATH, path)
    }


def module_names(tensor: StoredTensors) -> list[str]:
    """Return the names of a dense layer in the Hugging Face model, one for each layer of the encoder."""
    return [name.removesuffix(".weight") for name in tensor.names]


def matches(name: str, target: str) -> bool:
    """Return whether PEFT's `target_modules`, if it is [target] or the regular expression `target`, includes a
    module."""
    return name == target or name.endswith(f".{target}") or bool(re.fullmatch(target, name))


def choose_layers(config: EncoderConfig, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the dense layers that get adapters, relative to a layer.

    Args:
        targets: names of modules, such as "q_proj", or regular expressions of full names, as in PEFT, or "all-linear".

    Raises:
        ValueError: a target matches nothing, or only modules of some layers.
    """
    layers = matching_layers(config, targets, "lora.targets")
    for path, numbers in layers.items():
        if len(numbers) < config.num_layers:
            raise ValueError(
                f"lora.targets matches {path!r} in only {len(numbers)} of {config.num_layers} layers; give a target "
                "for all layers, and choose layers with lora.layers"
            )
    return tuple(layers)


def matching_layers(config: EncoderConfig, targets: Iterable[str], key: str) -> dict[str, set[int]]:
    """Return {path of a dense layer, relative to a layer: numbers of the layers, from 1, where a target matches it}.

    Args:
        targets: targets, as in `choose_layers`.
        key: key that has the targets, for errors.

    Raises:
        ValueError: a target is not a regular expression, or matches nothing.
    """
    layers = linear_layers(config)
    numbers_by_path: dict[str, set[int]] = {}
    for target in targets:
        try:
            re.compile(target)
        except re.error as error:
            raise ValueError(f"{key} has {target!r}, which is not a regular expression: {error}") from error
        hits = {
            path: {n for n, name in enumerate(module_names(tensor), 1) if target == ALL_LINEAR or matches(name, target)}
            for path, tensor in layers.items()
        }
        if not any(hits.values()):
            short = sorted({name.rpartition(".")[2] for tensor in layers.values() for name in module_names(tensor)})
            example = module_names(next(iter(layers.values())))[0]
            several = f"; several targets are written as {tuple(target.split(','))}" if "," in target else ""
            raise ValueError(
                f"{key} has {target!r}, which matches no dense layer of the encoder; use "
                f"{', '.join(short)} (as in {example}), or {ALL_LINEAR!r}{several}"
            )
        for path, numbers in hits.items():
            if numbers:
                numbers_by_path.setdefault(re.sub(LAYER_PATH, "", path, count=1), set()).update(numbers)
    return numbers_by_path


def layer_numbers(config: EncoderConfig, settings: Any) -> tuple[int, ...]:
    """Return the numbers of the layers, from 1, that get adapters by a config's group `lora`. Raises ValueError for
    repeated or missing layers."""
    all_numbers = range(1, config.num_layers + 1)
    numbers = tuple(sorted(set(settings.layers)))
    if len(numbers) != len(settings.layers):
        raise ValueError(f"lora.layers is {tuple(settings.layers)}; it must name different layers")
    if set(numbers) - set(all_numbers):
        raise ValueError(f"lora.layers is {tuple(settings.layers)}; the encoder has layers 1 to {config.num_layers}")
    return numbers or tuple(all_numbers)


def make_adapters(settings: Any, config: EncoderConfig) -> Adapters | None:
    """Return the adapters of a config's group `lora` for an encoder, or None without adapters.

    Raises ValueError with the key for an invalid value.
    """
    if settings.rank == 0:
        return None
    if settings.rank < 0:
        raise ValueError(f"lora.rank is {settings.rank}; it must be at least 1, or 0 for no adapters")
    if settings.rank > config.hidden_size:
        raise ValueError(
            f"lora.rank is {settings.rank}, more than the hidden size, {config.hidden_size}. An adapter would be "
            "larger than its layer; set a smaller rank, such as 16"
        )
    if settings.alpha <= 0:
        raise ValueError(f"lora.alpha is {settings.alpha}; it must be above 0")
    if settings.base_dtype not in BASE_DTYPES:
        raise ValueError(f"lora.base_dtype is {settings.base_dtype!r}; it must be one of {', '.join(BASE_DTYPES)}")
    if not 0 <= settings.dropout < 1:
        raise ValueError(f"lora.dropout is {settings.dropout}; it must be from 0 to below 1")
    if not settings.targets:
        raise ValueError(f"lora.targets is empty; it must name dense layers, or be ({ALL_LINEAR!r},)")
    layers = choose_layers(config, settings.targets)
    scaling = settings.alpha / (settings.rank**0.5 if settings.rslora else settings.rank)
    return Adapters(settings.rank, scaling, settings.dropout, layers, layer_numbers(config, settings))


def with_adapters(model: ModelT, settings: Any) -> ModelT:
    """Return a model with the adapters of a config's group `lora`. Raises ValueError for an invalid value."""
    adapters = make_adapters(settings, model.module.config)
    return model.with_compute(adapters=adapters) if adapters else model


def cast_base(params: Params, dtype: str) -> Params:
    """Return parameters with the base's kernels and tables in `dtype`. Other parameters are small and stay float32."""

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path_name(path)
        of_base = re.search(BASE, name) and name.endswith(("kernel", "embedding"))
        return leaf.astype(jnp.dtype(dtype)) if of_base else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def merge_adapters(params: Mapping[str, Any], scaling: float) -> Params:
    """Return float32 parameters on the host, with scaling * A B added to every kernel that has an adapter."""
    if "lora_a" in params:
        kernel = np.asarray(params["kernel"], np.float32) + low_rank(params["lora_a"], params["lora_b"], scaling)
        remainder = {name: leaf for name, leaf in params.items() if name not in ("kernel", "lora_a", "lora_b")}
        return {"kernel": kernel, **{name: np.asarray(leaf, np.float32) for name, leaf in remainder.items()}}
    return {
        name: merge_adapters(part, scaling) if isinstance(part, Mapping) else np.asarray(part, np.float32)
        for name, part in params.items()
    }


def low_rank(a: Any, b: Any, scaling: float) -> Float[np.ndarray, "*layers I O"]:
    """Return scaling * A B, computed in float32.

    Args:
        a: matrix A, [*layers, I, rank].
        b: matrix B, [*layers, rank, O].
        scaling: factor of the product.
    """
    return np.float32(scaling) * (np.asarray(a, np.float32) @ np.asarray(b, np.float32))
