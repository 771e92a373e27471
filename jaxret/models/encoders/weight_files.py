"""The weights of a Hugging Face directory: model.safetensors, or the parts that model.safetensors.index.json lists."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.storage.atomic import sha256_file
from jaxret.storage.foreign_files import open_tensors, read_settings, tensor_shapes

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class StoredWeights:
    """The opened weights of a directory, by tensor name."""

    def __init__(self, path: Path, files: dict[str, Path], handles: dict[Path, Any]) -> None:
        self.path, self.files, self._handles = path, files, handles  # path is for messages

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self.files[name]].get_slice(name).get_shape())

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as float32. Raises ValueError if it holds NaN or infinity."""
        array = np.asarray(self._handles[self.files[name]].get_tensor(name), np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"{self.files[name]}: {name} holds NaN or infinity; all weights must be finite")
        return array


@contextmanager
def open_weights(directory: str | Path) -> Iterator[StoredWeights]:
    """Open the weights of a directory. Raises FileNotFoundError for missing files, and ValueError for an index that
    does not match its parts."""
    files = weight_files(directory)
    with ExitStack() as stack:
        paths = sorted(set(files.values()))
        handles = {path: stack.enter_context(open_tensors(path)) for path in paths}
        for name, path in files.items():
            if name not in handles[path].keys():  # noqa: SIM118 (not a dict)
                raise ValueError(
                    f"{Path(directory) / INDEX_FILE} says that {name} is in {path.name}, which does not have it"
                )
        for path in paths:
            if unlisted_names := sorted(set(handles[path].keys()) - files.keys()):
                raise ValueError(f"{path} has {unlisted_names[0]}, which {INDEX_FILE} does not list")
        yield StoredWeights(paths[0] if len(paths) == 1 else Path(directory) / INDEX_FILE, files, handles)


def weight_files(directory: str | Path) -> dict[str, Path]:
    """Return {tensor name: its file}.

    Raises:
        FileNotFoundError: the weights or a part of them are missing.
        ValueError: the index is damaged, or is not a file.
    """
    directory = Path(directory)
    single_file, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    for path in (single_file, index):
        if os.path.lexists(path) and not path.is_file():
            raise ValueError(f"{path} is not a file")  # a pipe, or a link without a target
    if single_file.is_file():
        with open_tensors(single_file) as file:
            return dict.fromkeys(file.keys(), single_file)
    if not index.is_file():
        remedy = "a Hugging Face directory with safetensors is needed"
        if (directory / "pytorch_model.bin").is_file():
            remedy = "pytorch_model.bin is a pickle and is never opened here; this converts it:\n" + (
                conversion_command(directory)
            )
        raise FileNotFoundError(f"{directory} has neither {single_file.name} nor {index.name}; {remedy}")
    parts = read_settings(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise ValueError(f"{index}: the key 'weight_map' must name a file for each tensor")
    for part in sorted(set(parts.values())):
        if Path(part).name != part or not (directory / part).is_file():
            raise FileNotFoundError(f"{index} names {part}, which is not a file in {directory}; download it again")
    return {name: directory / part for name, part in parts.items()}


def weight_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name, without reading the tensors. Raises the errors of `weight_files`."""
    return {
        name: shape for path in set(weight_files(directory).values()) for name, shape in tensor_shapes(path).items()
    }


def has_weights(directory: Path) -> bool:
    """Return whether a directory has safetensors weights, in one file or in parts."""
    return any((directory / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))


def weights_digest(directory: str | Path, expected: str = "") -> str:
    """Return the hex SHA-256 of model.safetensors. For weights in parts, return the SHA-256 of the output of sha256sum,
    the lines "DIGEST  NAME". Raises ValueError if the digest differs from `expected`."""
    single_file = Path(directory) / WEIGHTS_FILE
    if single_file.is_file():
        path, digest = single_file, sha256_file(single_file)
    else:
        path, parts = Path(directory) / INDEX_FILE, sorted(set(weight_files(directory).values()))
        lines = "".join(f"{sha256_file(part)}  {part.name}\n" for part in parts)
        digest = hashlib.sha256(lines.encode()).hexdigest()
    if expected and digest != expected:
        raise ValueError(
            f"{path} has sha256 {digest}, but encoder.sha256 requires {expected}: these are not the expected weights"
        )
    return digest


def conversion_command(directory: Path) -> str:
    """Return the shell command that writes model.safetensors from pytorch_model.bin. It needs torch, which this package
    does not require. `weights_only=True` keeps the pickle from running code."""
    folder = str(directory)
    code = (
        f"import torch, safetensors.torch as s; d = {folder!r}; "
        "w = torch.load(d + '/pytorch_model.bin', map_location='cpu', weights_only=True); "
        "s.save_file({k: v.contiguous().clone() for k, v in w.items()}, d + '/model.safetensors', {'format': 'pt'})"
    )
    return f"python -c {shlex.quote(code)}"


def gguf_command(path: Path) -> str:
    """Return the shell command that writes a Hugging Face directory from a GGUF file: config, tokenizer, and float32
    weights. It needs torch, transformers and gguf, which this package does not require."""
    code = (
        "from transformers import AutoModel, AutoTokenizer; "
        f"d, f = {str(path.parent)!r}, {path.name!r}; m = AutoModel.from_pretrained(d, gguf_file=f); "
        "m.hf_quantizer = None; m.config.__dict__.pop('quantization_config', None); "  # the weights are float32 now
        "m.save_pretrained(d); AutoTokenizer.from_pretrained(d, gguf_file=f).save_pretrained(d)"
    )
    return f"python -c {shlex.quote(code)}"
