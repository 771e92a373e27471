"""Read the values of mteb's ModelMeta from a model card: licence, languages, origin, training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from mteb.languages.iso_mappings import _hf_langs_to_iso_lang_scripts as mteb_languages

# Keys that a card states under ModelMeta's names, because Hugging Face has no names for them.
MTEB_KEYS = ("release_date", "open_weights", "public_training_code", "public_training_data", "reference", "citation")
_LISTS = ("language", "base_model", "training_datasets")  # keys whose value may be one text instead of a list


def card_values(path: Path) -> dict[str, Any]:
    """Return values for ModelMeta from a model card, a README.md with Hugging Face's metadata.

    The result has only the keys that the card states. The names of mteb's tasks are in the card's key
    `training_datasets`; its key `datasets` has names of the hub and is not read.

    Raises:
        ValueError: the file has no metadata, or mteb does not accept a value.
        FileNotFoundError: the file does not exist.
    """
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("---"):
        raise ValueError(f"{path} has no metadata: it must begin with YAML between two lines ---, such as license: mit")
    try:
        metadata = ModelCard(text).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}: the text between the lines --- must be YAML keys and values ({first})") from error
    for key in _LISTS:
        if key in metadata:
            metadata[key] = metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
    values = {key: metadata[key] for key in MTEB_KEYS if key in metadata}
    if "license" in metadata:
        values["license"] = metadata.get("license_link") if metadata["license"] == "other" else metadata["license"]
    if "language" in metadata:
        values["languages"] = sorted({_language(path, str(name)) for name in metadata["language"]})
    if "base_model" in metadata:
        values["adapted_from"] = metadata["base_model"][0]
    if "training_datasets" in metadata:
        values["training_datasets"] = set(metadata["training_datasets"])
    return values


def _language(path: Path, name: str) -> str:
    if not (codes := mteb_languages(name)):
        raise ValueError(f"{path}: language is {name!r}; it must be a code of ISO 639, such as en or eng-Latn")
    return str(codes[0])
