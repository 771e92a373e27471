"""Dense modules of sentence-transformers and PyLate: each is a matrix in a separate folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.models.encoders.sentence_transformers import MODULES, read_modules
from jaxret.storage.foreign_files import read_settings, read_tensors

_IDENTITY = "torch.nn.modules.linear.Identity"
# Keys of config.json besides the sizes -> the value where the key is missing, and the allowed values.
_SETTINGS: dict[str, tuple[Any, Sequence[Any]]] = {
    "bias": (True, (False,)),
    "activation_function": ("torch.nn.modules.activation.Tanh", (_IDENTITY,)),
    "use_residual": (False, (False,)),
    "module_input_name": ("sentence_embedding", ("sentence_embedding",)),
    "module_output_name": (None, (None, "sentence_embedding")),
}


def read_dense(folder: Path, settings: Mapping[str, tuple[Any, Sequence[Any]]] = _SETTINGS) -> np.ndarray:
    """Return the matrix [in,out] of a Dense module.

    Args:
        folder: folder of the module.
        settings: keys of config.json -> the value where the key is missing, and the allowed values.

    Raises:
        ValueError: the module computes more than a product.
        FileNotFoundError: the folder has no model.safetensors.
    """
    config = read_settings(folder / "config.json")
    for key, (default, values) in settings.items():
        if config.get(key, default) not in values:
            value = config.get(key, default)
            raise ValueError(f"{folder / 'config.json'}: {key} is {value!r}; only {values[0]!r} is implemented")
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} has no model.safetensors; save the model as safetensors: a pickle is never opened"
        )
    tensors = read_tensors(folder / "model.safetensors")
    if set(tensors) != {"linear.weight"} or tensors["linear.weight"].ndim != 2:
        raise ValueError(f"{folder / 'model.safetensors'} has {', '.join(sorted(tensors))}; linear.weight is needed")
    matrix = np.ascontiguousarray(tensors["linear.weight"].T, np.float32)
    for key, size in zip(("in_features", "out_features"), matrix.shape, strict=True):
        if config.get(key, size) != size:
            raise ValueError(f"{folder / 'config.json'}: {key} is {config[key]!r}; linear.weight has {size}")
    return matrix


def read_dense_modules(root: Path) -> list[np.ndarray]:
    """Return the matrices of a sentence-transformers directory's Dense modules, in order. Raises ValueError if a matrix
    does not fit the matrix before it."""
    if not (root / MODULES).is_file():
        return []
    folders = [module.folder for module in read_modules(root) if module.kind == "Dense"]
    matrices = [read_dense(folder) for folder in folders]
    for folder, predecessor, matrix in zip(folders[1:], matrices, matrices[1:], strict=False):
        if predecessor.shape[1] != matrix.shape[0]:
            raise ValueError(
                f"{folder}: the module expects vectors of size {matrix.shape[0]}; the module before it returns size "
                f"{predecessor.shape[1]}"
            )
    return matrices
