"""A sentence-transformers directory: what its modules say of texts and vectors, in the config's own keys.

modules.json lists the modules and their folders; all that is read is JSON. What they compute is the dual encoder's
vector: `head.token`, `normalize`, the lengths and the prompts. Whatever else a directory asks for is refused by name,
because the encoder alone would give other vectors without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.models.encoders.architectures import read_config
from jaxret.storage import read_json

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = {"query": "tokens.query_length", "document": "tokens.passage_length"}
PROMPTS = {"tokens.query_prompt": ("query",), "tokens.passage_prompt": ("document", "passage", "corpus")}
DENSE = "pylate.models.Dense.Dense"  # of PyLate's models, whose vectors heads/pylate.py reads
_REASONS = {
    "Router": "queries and documents have encoders of their own; one encoder is read from a directory",
    "Asym": "queries and documents have encoders of their own; one encoder is read from a directory",
    "Dense": "the dual encoder has no projection",
    "WeightedLayerPooling": "it mixes layers for queries too, whose vector is the last layer's here",
}
_PYLATE = ["sentence_transformersTransformer", "pylateDense"]
# The file names that sentence-transformers has had for a Transformer's settings, and what it says in them.
_TRANSFORMER = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_PLAIN: dict[str, tuple[Any, ...]] = {  # key -> the values that change nothing here
    "do_lower_case": (False,),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({},),
    "query_expansion": (),
    "model_args": ({},),
    "tokenizer_args": ({},),
    "config_args": ({},),
}
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}  # the only modality there is here
_POOLINGS = {  # old key -> mode; several are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Module(NamedTuple):
    """A line of modules.json."""

    kind: str  # the class, without its package
    folder: Path


def modules(root: Path) -> list[Module]:
    """The modules of a directory, in order; none if it is no sentence-transformers directory. Raises ValueError naming
    the first that cannot be had here."""
    path = root / MODULES
    if not path.is_file():
        return []
    try:
        lines = [(str(line["type"]), str(line["path"])) for line in read_json(path)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a list of modules with type and path is needed ({error!r})") from error
    found = [Module(type.rpartition(".")[2], root / folder) for type, folder in lines]
    wanted = ("Transformer", "Pooling", "Normalize")
    if is_pylate(root):
        if [type.partition(".")[0] + module.kind for (type, _), module in zip(lines, found, strict=True)] != _PYLATE:
            raise ValueError(f"{path}: PyLate's modules here are {', '.join(t for t, _ in lines)}; a Transformer and "
                             "one Dense are read")  # fmt: skip
        return found
    for number, ((type, folder), module) in enumerate(zip(lines, found, strict=True)):
        if module.kind != wanted[min(number, 2)] or not type.startswith("sentence_transformers."):
            reason = _REASONS.get(module.kind, f"modules are {', '.join(wanted)} (or without the last), in this order")
            raise ValueError(f"{path}: module {number}, {folder or module.kind}, is a {type}; {reason}")
    if len(found) < 2:
        raise ValueError(f"{path}: {len(found)} module(s); a Transformer and a Pooling are needed")
    return found


def is_pylate(root: Path) -> bool:
    """Whether a directory has modules of PyLate."""
    path = root / MODULES
    lines = read_json(path) if path.is_file() else []
    return isinstance(lines, list) and any(str(dict(line).get("type", "")).startswith("pylate.") for line in lines)


def encoder_folder(root: Path) -> Path:
    """Where the encoder of a directory is: the folder of its Transformer, or, without modules.json, the directory."""
    return modules(root)[0].folder if (root / MODULES).is_file() else root


def stated(root: Path) -> dict[str, Any]:
    """What a directory says, as keys of the config with their values; {} if it is no sentence-transformers directory.

    Cosine similarity, which is what is meant where none is named, is the product of vectors of length 1, so it is
    `normalize=True`, whether there is a Normalize module or not. Raises ValueError with file and key for what cannot be
    had here.
    """
    found = modules(root)
    if not found:
        return {}
    settings = _read(root / SETTINGS)
    if (kind := settings.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise ValueError(f"{root / SETTINGS}: model_type is {kind!r}; only 'SentenceTransformer' is read")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"{root / SETTINGS}: similarity_fn_name is {similarity!r}; scores here are 'cosine' or 'dot'")
    if settings.get("truncate_dim"):
        raise ValueError(f"{root / SETTINGS}: truncate_dim is {settings['truncate_dim']}; vectors are not cut here")
    prompts = _prompts(root / SETTINGS, settings)
    token = _token(found[1].folder / "config.json", any(prompts.values()))
    normalize = similarity == "cosine" or len(found) > 2
    return {"head.token": token, "normalize": normalize, **_lengths(found[0].folder), **prompts}


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no file."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a JSON object is needed, found {type(found).__name__}")
    return found


def _token(path: Path, prompted: bool) -> str:
    """The Pooling's mode: "cls" or "mean"."""
    raw = _read(path)
    chosen = raw.get("pooling_mode") or [mode for key, mode in _POOLINGS.items() if raw.get(key)] or "mean"
    modes = [chosen] if isinstance(chosen, str) else list(chosen)
    if len(modes) != 1 or modes[0] not in ("cls", "mean"):
        raise ValueError(f"{path}: the pooling is {' and '.join(map(str, modes))}; 'cls' or 'mean' is implemented")
    if prompted and raw.get("include_prompt", True) is not True:
        raise ValueError(f"{path}: include_prompt is {raw['include_prompt']!r}; a prompt's tokens always count here")
    return modes[0]


def _prompts(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The prompt of each side: the first of its names that has a text."""
    prompts = settings.get("prompts") or {}
    known = [name for names in PROMPTS.values() for name in names]
    if (name := settings.get("default_prompt_name")) not in (None, *known):
        raise ValueError(f"{path}: default_prompt_name is {name!r}, of which nobody says whether it is for queries")
    if not isinstance(prompts, dict) or not all(isinstance(prompts.get(n) or "", str) for n in known):
        raise ValueError(f"{path}: prompts is {prompts!r}; texts by name are needed")
    return {key: next((prompts[n] for n in names if prompts.get(n)), "") for key, names in PROMPTS.items()}


def _lengths(folder: Path) -> dict[str, int]:
    """Tokens that a text may have, markers included: what the Transformer's settings say, else the tokenizer's limit;
    never more than the encoder has positions."""
    paths = [folder / f"sentence_{name}_config.json" for name in _TRANSFORMER]
    path = next((path for path in paths if path.is_file()), paths[0])
    raw = _read(path)
    for key, allowed in _PLAIN.items():
        if raw.get(key) not in (None, *allowed):
            right = " or ".join(map(repr, allowed)) or "null"
            raise ValueError(f"{path}: {key} is {raw[key]!r}; only {right} is implemented")
    if (modality := raw.get("modality_config", {"text": _TEXT})) != {"text": _TEXT}:
        raise ValueError(f"{path}: modality_config is {modality!r}; only text, as its last hidden state, is read")
    limit = raw.get("max_seq_length") or _read(folder / "tokenizer_config.json").get("model_max_length", sys.maxsize)
    longest = min(limit, read_config(folder).longest)
    lengths = {key: min(raw.get(f"{side}_length") or longest, longest) for side, key in LENGTHS.items()}
    for key, length in lengths.items():
        if type(length) is not int or length < 3:
            raise ValueError(f"{path}: the length of texts, {key}, is {length!r}; it must be a whole number from 3 on")
    return {key: length for key, length in lengths.items() if length < sys.maxsize}
