"""Set unset keys of a config to the settings of a sentence-transformers directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.tokens.tokenizer import AUTO_SEPARATOR, SEPARATOR
from jaxret.models.encoders.sentence_transformers import (
    DIMENSION_KEY,
    END_TOKEN,
    LENGTH_KEYS,
    MODULES,
    PROMPT_IN_MEAN,
    PROMPTS,
    TITLE_SEPARATOR,
)
from jaxret.models.heads import HEADS

# The keys that a directory can set, with the value that counts as unset (the default of configs/base.py).
UNSET: dict[str, Any] = {
    **{f"head.{name}.{key}": getattr(head, key) for name, head in HEADS.items() for key in head.DIRECTORY_KEYS},
    "head.token": "cls",
    "normalize": False,
    **dict.fromkeys(LENGTH_KEYS.values(), 256),
    **dict.fromkeys(PROMPTS, ""),
    TITLE_SEPARATOR: AUTO_SEPARATOR,
    DIMENSION_KEY: 0,
    PROMPT_IN_MEAN: True,
    END_TOKEN: True,
}
_OF_VECTORS = ("head.token", "normalize", DIMENSION_KEY, PROMPT_IN_MEAN)


def _of_family(key: str) -> str:
    """Return the head NAME of a key "head.NAME.KEY"; "" for any other key."""
    parts = key.split(".")
    return parts[1] if parts[0] == "head" and len(parts) == 3 else ""


def settings_family(settings: Mapping[str, Any]) -> str:
    """Return the head that a directory declares; "" for the single vector of sentence-transformers, and for other
    directories."""
    return next(filter(None, map(_of_family, settings)), "")


def apply_settings(
    config: ConfigDict, settings: Mapping[str, Any], source: str, explicit_keys: Iterable[str] = ()
) -> tuple[ConfigDict, list[str]]:
    """Return a copy of the config with unset keys set from a directory, and the changes as "key=value" texts.

    A key is unset if it has the default of configs/base.py and is not explicit. A length may be shorter than the
    directory's. A directory without a prompt allows any, because training with a prompt is usual; an explicit empty
    prompt is allowed together with tokens.prompts. The separator of titles may differ, because no file of the directory
    has it. For a head with other vectors than the directory's, only the settings of texts are used.

    Args:
        config: the config.
        settings: settings of the directory, by key of the config.
        source: name of the directory, for the error message.
        explicit_keys: keys that the user set, even to the default.

    Raises:
        ValueError: keys of the config contradict the directory; the message names all of them.
    """
    config, changes, problems = ConfigDict(config.to_dict()).lock(), list[str](), list[str]()
    family = settings_family(settings)
    if config.head.name in HEADS and not (config.head.name == family if family else HEADS[config.head.name].STOCK):
        settings = {key: value for key, value in settings.items() if key not in _OF_VECTORS and not _of_family(key)}
    own_keys = set(explicit_keys) - {TITLE_SEPARATOR}  # "auto" selects the directory's
    prompt_keys = own_keys & set(PROMPTS) if config.tokens.prompts else set()
    for key, value in ({TITLE_SEPARATOR: SEPARATOR} | dict(settings)).items():
        value = tuple(value) if isinstance(value, list) else value
        *groups, name = key.split(".")
        group = reduce(getattr, groups, config)
        current = group[name]
        if current == value or (key in prompt_keys and not current) or (key in PROMPTS and not value):
            continue
        if current == UNSET[key] and key not in own_keys:
            group[name] = value
            changes += [f"{key}={value!r}"] if key in settings else []
        elif key != TITLE_SEPARATOR and (key not in LENGTH_KEYS.values() or current > value):
            problems.append(f"{key} is {current!r} in the config and {value!r} in the modules")
    if problems:
        raise ValueError(
            f"the sentence-transformers modules of {source} contradict the config: {'; '.join(problems)}. "
            f"Remove these keys, or give a copy of the directory without {MODULES}: the encoder alone"
        )
    return config, changes
