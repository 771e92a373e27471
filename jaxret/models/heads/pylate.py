"""PyLate directories: ColBERT checkpoints in files like those of sentence-transformers.

modules.json lists a Transformer and PyLate's Dense (the projection). config_sentence_transformers.json has the markers,
the lengths, whether queries are filled with [MASK]s, and the words of passages that get no vector. PyLate inserts a
marker after the first token of a text, which it cuts one token earlier. It pads queries to their length; by default, no
token attends to this padding. It scales every vector to length 1. [pylate/models/colbert.py]
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.tokens.backend import load_backend
from jaxret.models.encoders.dense_modules import read_dense
from jaxret.models.encoders.sentence_transformers import (
    DENSE,
    LENGTH_KEYS,
    MODULES,
    PROMPTS,
    SETTINGS,
    TITLE_SEPARATOR,
    encoder_folder,
    is_pylate,
    read_modules,
    title_separator,
)
from jaxret.storage.foreign_files import read_settings

# Keys of config_sentence_transformers.json -> PyLate's defaults.
DEFAULTS: dict[str, Any] = {
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 32,
    "document_length": 180,
    "do_query_expansion": True,
    "attend_to_expansion_tokens": False,
    "skiplist_words": list(string.punctuation),
}
USE = """from pylate import models
model = models.ColBERT("FOLDER")
queries, passages = model.encode([...], is_query=True), model.encode([...], is_query=False)"""
_DENSE: dict[str, tuple[Any, ...]] = {  # keys of Dense's config.json besides the sizes -> allowed values
    "bias": (False,),
    "activation_function": ("torch.nn.modules.linear.Identity",),
    "use_residual": (False,),
}


def read_pylate_keys(root: Path) -> dict[str, Any]:
    """Return {config key: value} of the settings in a PyLate directory, or {} for any other directory. Raises
    ValueError with file and key for settings that are not supported."""
    if not is_pylate(root):
        return {}
    settings = _read_settings(root)
    backend, special = load_backend(encoder_folder(root))
    lengths = {f"{side}_length": settings[f"{side}_length"] for side in LENGTH_KEYS}
    for key, length in lengths.items():
        if type(length) is not int or length < 4:
            raise ValueError(f"{root / SETTINGS}: {key} is {length!r}; it must be a whole number, 4 or more")
    expansion = "none"
    if settings["do_query_expansion"]:
        expansion = "attended" if settings["attend_to_expansion_tokens"] else "unattended"
        if special["mask"] is None:
            raise ValueError(f"{root}: queries are filled with [MASK], which the tokenizer does not have")
    unknown = backend.token_to_id(_unknown_token(root))
    words = {backend.token_to_id(word) for word in settings["skiplist_words"]}
    skip_ids = {unknown if id is None else id for id in words} - {None}
    head_keys = {
        "projection": int(read_projection(root).shape[1]),
        "late": True,
        "query_marker": _marker(root, backend, settings["query_prefix"]),
        "passage_marker": _marker(root, backend, settings["document_prefix"]),
        "expansion": expansion,
        "skiplist": tuple(sorted(skip_ids)),
        **({} if expansion == "none" else {"mask_id": special["mask"]}),
    }
    return {
        **{f"head.colbert.{key}": value for key, value in head_keys.items()},
        "normalize": True,
        **{key: lengths[f"{side}_length"] for side, key in LENGTH_KEYS.items()},
        **dict.fromkeys(PROMPTS, ""),
        TITLE_SEPARATOR: title_separator(root),
    }


def read_projection(root: Path) -> np.ndarray:
    """Return the projection [H,D] of a PyLate directory. Raises ValueError if its module computes more than a
    product."""
    folder = read_modules(root)[1].folder
    return read_dense(folder, {key: (values[0], values) for key, values in _DENSE.items()})


def pylate_settings(head: Any, lengths: Mapping[str, int], words: Mapping[int, str]) -> dict[str, Any]:
    """Return PyLate's settings for a head. Raises ValueError for a head that PyLate does not have.

    Args:
        head: a `ColbertHead`.
        lengths: length limits in tokens of "query" and "document".
        words: words of the vocabulary by id.
    """
    if not head.late_interaction():
        raise ValueError(
            "PyLate needs a vector for every token of a query, but this run has one per query: use --to=hf"
        )
    prefixes = {"query_prefix": head.query_marker, "document_prefix": head.passage_marker}
    return {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "prompts": {},
        "default_prompt_name": None,
        **{key: "" if id == -1 else words[id] for key, id in prefixes.items()},
        **{f"{side}_length": length for side, length in lengths.items()},
        "do_query_expansion": head.expansion != "none",
        "attend_to_expansion_tokens": head.expansion == "attended",
        "skiplist_words": [words[id] for id in head.skiplist],
    }


def dense_module(kernel: np.ndarray) -> tuple[str, dict[str, Any]]:
    """Return (type, config.json) of PyLate's Dense module with `kernel` [H,D]."""
    sizes = {"in_features": kernel.shape[0], "out_features": kernel.shape[1]}
    return DENSE, {**sizes, **{key: values[0] for key, values in _DENSE.items()}}


def _read_settings(root: Path) -> dict[str, Any]:
    path = root / SETTINGS
    settings = DEFAULTS | (read_settings(path) if path.is_file() else {})
    if (kind := settings.get("model_type", "ColBERT")) != "ColBERT":
        raise ValueError(
            f"{path}: model_type is {kind!r}; it must be 'ColBERT', because {root / MODULES} has PyLate's modules"
        )
    if settings.get("default_prompt_name"):
        raise ValueError(f"{path}: default_prompt_name is {settings['default_prompt_name']!r}; it must be null")
    for key in DEFAULTS:
        if settings[key] is None:
            settings[key] = DEFAULTS[key]
    return settings


def _marker(root: Path, backend: Any, prefix: str) -> int:
    """Return the id of a marker, or -1 if `prefix` is empty. Raises ValueError for a marker that is not a token."""
    if not prefix:
        return -1
    if (id := backend.token_to_id(prefix)) is None:
        raise ValueError(f"{root}: the tokenizer has no token {prefix!r}, which {SETTINGS} names as a marker")
    return id


def _unknown_token(root: Path) -> str:
    path = encoder_folder(root) / "tokenizer_config.json"
    token = read_settings(path).get("unk_token") if path.is_file() else None
    return str(token.get("content") if isinstance(token, dict) else token)
