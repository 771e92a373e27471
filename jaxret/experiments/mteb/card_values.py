"""The values of mteb's ModelMeta that a model card states: licence, languages, origin, training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from mteb.languages.iso_mappings import _hf_langs_to_iso_lang_scripts as mteb_languages

# Keys of ModelMeta that a card states by the same names; Hugging Face has no keys of its own for them.
MTEB_KEYS = ("release_date", "open_weights", "public_training_code", "public_training_data", "reference", "citation")
_LISTS = ("language", "base_model", "training_datasets")  # that a card may have as one text


def card_values(path: Path) -> dict[str, Any]:
    """Return values for ModelMeta from a card, a README.md with metadata as Hugging Face has them.

    Only what the card states is in the result. `datasets` are names at the hub, which are not names of mteb's tasks:
    `training_datasets` has those.

    Raises:
        ValueError: the file has no metadata, or a value of them is none that mteb takes.
        FileNotFoundError: there is no such file.
    """
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("---"):
        raise ValueError(f"{path} has no metadata: it must begin with YAML between two lines ---, such as license: mit")
    try:
        metadata = ModelCard(text).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}: what is between the lines --- is not YAML of keys and values ({first})") from error
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
        raise ValueError(f"{path}: language is {name!r}; write a code of ISO 639, such as en, or eng-Latn")
    return str(codes[0])
