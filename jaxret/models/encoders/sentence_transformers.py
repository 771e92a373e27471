"""sentence-transformers directories: the settings of their modules as keys of the config.

modules.json lists the modules and their folders; only JSON is read. The modules compute the vector of a dual encoder
with `head.token`, `normalize`, lengths and prompts. Any other setting is an error, because ignoring it would silently
change the vectors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.data.tokens.tokenizer import SEPARATOR
from jaxret.models.encoders.architectures import is_language_model, read_config
from jaxret.storage.foreign_files import read_settings

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTH_KEYS = {"query": "tokens.query_length", "document": "tokens.passage_length"}
TITLE_SEPARATOR = "tokens.title_separator"
DIMENSION_KEY = "encode.dimension"
PROMPT_IN_MEAN = "tokens.prompt_in_mean"
END_TOKEN = "tokens.end_token"
PROMPTS = {"tokens.query_prompt": ("query",), "tokens.passage_prompt": ("document", "passage", "corpus")}
DENSE = "pylate.models.Dense.Dense"  # in models of PyLate, which heads/pylate.py reads
_REASONS = {
    "Router": "queries and documents have encoders of their own; one encoder is read from a directory",
    "Asym": "queries and documents have encoders of their own; one encoder is read from a directory",
    "WeightedLayerPooling": "it mixes layers for queries too, whose vector is the last layer's here",
}
_PYLATE = ["sentence_transformersTransformer", "pylateDense"]
# File names that sentence-transformers has used for a Transformer's settings.
_TRANSFORMER = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_PLAIN: dict[str, tuple[Any, ...]] = {  # key of the Transformer's settings -> values without effect
    "do_lower_case": (False,),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({},),
    "query_expansion": (),
    "model_args": ({},),
    "tokenizer_args": ({},),
    "config_args": ({},),
}
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}  # the only supported modality
_POOLINGS = {  # key of older versions -> mode. With several modes, sentence-transformers concatenates the vectors
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class ModuleEntry(NamedTuple):
    """A line of modules.json."""

    kind: str  # name of the class, without its package
    folder: Path


def read_modules(root: Path) -> list[ModuleEntry]:
    """Return the modules of a directory, in order, or [] if it is not a sentence-transformers directory. Raises
    ValueError that names the first module that is not supported."""
    path = root / MODULES
    if not path.is_file():
        return []
    try:
        lines = [(str(line["type"]), str(line["path"])) for line in read_settings(path, object)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a list of modules is needed, each with type and path") from error
    for _, folder in lines:
        if Path(folder).is_absolute() or ".." in Path(folder).parts or "\0" in folder:
            raise ValueError(f"{path}: path is {folder!r:.80}; it must be a folder in {root}")
    entries = [ModuleEntry(type.rpartition(".")[2], root / folder) for type, folder in lines]
    expected = ("Transformer", "Pooling", "Dense", "Normalize")
    if is_pylate(root):
        if [type.partition(".")[0] + module.kind for (type, _), module in zip(lines, entries, strict=True)] != _PYLATE:
            raise ValueError(f"{path}: PyLate's modules are {', '.join(t for t, _ in lines)}; only a Transformer and "
                             "one Dense are supported")  # fmt: skip
        return entries
    for number, ((type, folder), module) in enumerate(zip(lines, entries, strict=True)):
        kinds = expected[number : number + 1] if number < 2 else expected[2:]
        ended = number > 2 and entries[number - 1].kind == "Normalize"
        if module.kind not in kinds or ended or not type.startswith("sentence_transformers."):
            reason = _REASONS.get(
                module.kind,
                f"modules are {', '.join(expected)}, in this order (any number of Dense, Normalize optional)",
            )
            raise ValueError(f"{path}: module {number}, {folder or module.kind}, is a {type}; {reason}")
    if len(entries) < 2:
        raise ValueError(f"{path}: {len(entries)} module(s); a Transformer and a Pooling are needed")
    return entries


def is_pylate(root: Path) -> bool:
    """Return whether a directory has modules of PyLate."""
    path = root / MODULES
    lines = read_settings(path, object) if path.is_file() else []
    return isinstance(lines, list) and any(
        isinstance(line, dict) and str(line.get("type", "")).startswith("pylate.") for line in lines
    )


def encoder_folder(root: Path) -> Path:
    """Return the folder of the encoder: the folder of the Transformer, or the directory itself without modules.json."""
    return read_modules(root)[0].folder if (root / MODULES).is_file() else root


def read_sentence_transformers_keys(root: Path) -> dict[str, Any]:
    """Return {config key: value} of the settings in a directory, or {} if it is not a sentence-transformers directory.

    Cosine similarity, the default, means `normalize=True`, with or without a Normalize module. Raises ValueError with
    file and key for settings that are not supported.
    """
    entries = read_modules(root)
    if not entries:
        return {}
    settings = _read_object(root / SETTINGS)
    if (kind := settings.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise ValueError(f"{root / SETTINGS}: model_type is {kind!r}; only 'SentenceTransformer' is read")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"{root / SETTINGS}: similarity_fn_name is {similarity!r}; it must be 'cosine' or 'dot'")
    size = settings.get("truncate_dim") or 0
    if type(size) is not int or size < 0:
        raise ValueError(f"{root / SETTINGS}: truncate_dim is {size!r}; it must be a whole number, 1 or more, or null")
    cut = {DIMENSION_KEY: size} if size else {}
    prompts = _prompts(root / SETTINGS, settings)
    token, in_mean = _token(entries[1].folder / "config.json")
    mean = {} if in_mean or token != "mean" else {PROMPT_IN_MEAN: False}
    normalize = similarity == "cosine" or entries[-1].kind == "Normalize"
    lengths = _read_lengths(entries[0].folder)
    title = {TITLE_SEPARATOR: title_separator(root)}
    end = {END_TOKEN: False} if is_language_model(read_config(entries[0].folder)) else {}
    return {"head.token": token, "normalize": normalize, **lengths, **prompts, **mean, **title, **cut, **end}


def title_separator(root: Path) -> str:
    """Return the text between title and text of a passage that a model was evaluated with, and usually trained with.

    sentence-transformers and PyLate read one text. BEIR, mteb and PyLate's evaluation join title and text with a space.
    """
    return " " if (root / MODULES).is_file() else SEPARATOR


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file does not exist."""
    return read_settings(path) if path.is_file() else {}


def _token(path: Path) -> tuple[str, bool]:
    """Return the value of head.token for a Pooling module, and whether tokens of a prompt count in its mean."""
    raw = _read_object(path)
    pooling_mode = raw.get("pooling_mode") or [mode for key, mode in _POOLINGS.items() if raw.get(key)] or "mean"
    modes = pooling_mode if isinstance(pooling_mode, list) else [pooling_mode]
    tokens = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in tokens:
        names = "'cls', 'mean' or 'lasttoken'"
        raise ValueError(f"{path}: the pooling is {' and '.join(map(str, modes))}; {names} is implemented")
    in_mean = raw.get("include_prompt", True)
    if type(in_mean) is not bool:
        raise ValueError(f"{path}: include_prompt is {in_mean!r}; it must be true or false")
    return tokens[modes[0]], in_mean


def _prompts(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the prompt of each side: the first non-empty prompt among the side's names."""
    prompts = settings.get("prompts") or {}
    prompt_names = [name for names in PROMPTS.values() for name in names]
    if (name := settings.get("default_prompt_name")) not in (None, *prompt_names):
        raise ValueError(f"{path}: default_prompt_name is {name!r}, which is no prompt of queries or passages")
    if not isinstance(prompts, dict) or not all(isinstance(prompts.get(name) or "", str) for name in prompt_names):
        raise ValueError(f"{path}: prompts is {prompts!r}; it must be an object of names and texts")
    return {key: next((prompts[name] for name in names if prompts.get(name)), "") for key, names in PROMPTS.items()}


def _read_lengths(folder: Path) -> dict[str, int]:
    """Return the length limits in tokens, markers included, from the Transformer's settings or else from the
    tokenizer's. No limit exceeds the encoder's positions."""
    paths = [folder / f"sentence_{name}_config.json" for name in _TRANSFORMER]
    path = next((path for path in paths if path.is_file()), paths[0])
    raw = _read_object(path)
    for key, values in _PLAIN.items():
        if raw.get(key) not in (None, *values):
            right = " or ".join(map(repr, values)) or "null"
            raise ValueError(f"{path}: {key} is {raw[key]!r}; only {right} is implemented")
    if (modality := raw.get("modality_config", {"text": _TEXT})) != {"text": _TEXT}:
        raise ValueError(f"{path}: modality_config is {modality!r}; only text with its last hidden state is supported")
    tokenizer_config = folder / "tokenizer_config.json"
    limit = raw.get("max_seq_length") or _read_object(tokenizer_config).get("model_max_length") or sys.maxsize
    limits = {f"max_seq_length, or model_max_length of {tokenizer_config.name}": limit}
    limits |= {key: raw.get(key) or limit for key in (f"{side}_length" for side in LENGTH_KEYS)}
    for key, value in limits.items():
        if type(value) not in (int, float):
            raise ValueError(f"{path}: {key} is {value!r}; a number of tokens is needed")
    longest = min(limit, read_config(folder).longest)
    lengths = {key: min(raw.get(f"{side}_length") or longest, longest) for side, key in LENGTH_KEYS.items()}
    for key, length in lengths.items():
        if type(length) is not int or length < 3:
            raise ValueError(f"{path}: the length of texts, {key}, is {length!r}; it must be a whole number, 3 or more")
    return {key: length for key, length in lengths.items() if length < sys.maxsize}
