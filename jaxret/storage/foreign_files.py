"""Read files of model folders from third parties, with limits of their sizes, and write tensors in their format.

The content of such a folder cannot be trusted. So the size of a file is checked before it is read, and the message of
an error has the path of the damaged file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxret.storage.atomic import atomic_write, read_json

MOST_SETTINGS = 8 * 2**20  # largest size of a JSON file in bytes; the largest known files have some kilobytes
MOST_VOCABULARY = 48 * 2**20  # largest size of a tokenizer file in bytes; Gemma's has 34 MB
_TYPES = ("F64", "F32", "F16", "BF16", "BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)))


def require_size(path: Path, limit: int = MOST_SETTINGS) -> None:
    """Raise ValueError unless a path is a file of at most `limit` bytes; FileNotFoundError if it does not exist."""
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a file; a model's settings and tokenizer are read from files")
    if size > limit:
        raise ValueError(f"{path} has {size:,} bytes; a file of this name has at most {limit:,}: it is something else")


def read_settings(path: Path, kind: type = dict) -> Any:
    """Return the JSON object in a file of a model's folder, or a value of another `kind`. Raises ValueError if the file
    is too large, is not JSON, or has another value."""
    require_size(path)
    content = read_json(path)
    if not isinstance(content, kind):
        raise ValueError(f"{path}: a JSON object is needed, found {type(content).__name__}")
    return content


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for the block.

    Raises ValueError if the file is damaged, also while tensors are read, or has a tensor of a type that numpy lacks.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if (kind := file.get_slice(name).get_dtype()) not in _TYPES:
                    raise ValueError(f"{path}: {name} is stored as {kind}; it must be one of {', '.join(_TYPES)}")
            yield file
    except SafetensorError as error:
        remedy = "fetch it again, or save the model again"
        raise ValueError(f"{path} is damaged, or is not a safetensors file ({error}); {remedy}") from None


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a safetensors file, by name. Raises ValueError if it is damaged."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. transformers needs the metadata {"format": "pt"}."""
    with atomic_write(path, "wb") as file:
        file.write(save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a safetensors file, by name; no tensor is read."""
    with open_tensors(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
