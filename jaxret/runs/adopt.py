"""What a sentence-transformers directory states becomes the config's, where the config leaves it open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.encoders.sentence_transformers import LENGTHS, MODULES, PROMPTS
from jaxret.models.heads import HEADS

# The keys that a directory decides, and the value of each that counts as not set (that of configs/base.py).
UNSET: dict[str, Any] = {
    "head.token": "cls",
    "normalize": False,
    **dict.fromkeys(LENGTHS.values(), 256),
    **dict.fromkeys(PROMPTS, ""),
}
_OF_VECTORS = ("head.token", "normalize")


def adopt(
    config: ConfigDict, stated: Mapping[str, Any], source: str, given: Iterable[str] = ()
) -> tuple[ConfigDict, list[str]]:
    """A copy of the config with what a directory states where the config says nothing, and what was set, as text.

    A key says nothing if its value is that of configs/base.py, unless it is one of `given`. A length may be shorter
    than stated. A family whose vector is another takes nothing but texts from the directory. Raises ValueError naming
    every key that says something else.
    """
    config, told, problems = ConfigDict(config.to_dict()).lock(), list[str](), list[str]()
    if config.head.name in HEADS and not HEADS[config.head.name].STOCK:
        stated = {key: value for key, value in stated.items() if key not in _OF_VECTORS}
    meant = set(given)
    for key, value in stated.items():
        *groups, name = key.split(".")
        place = config[groups[0]] if groups else config
        now = place[name]
        if now == value:
            continue
        if now == UNSET[key] and key not in meant:
            place[name] = value
            told.append(f"{key}={value!r}")
        elif key not in LENGTHS.values() or now > value:
            problems.append(f"{key} is {now!r}, there {value!r}")
    if problems:
        raise ValueError(
            f"the sentence-transformers modules of {source} say otherwise than the config: {'; '.join(problems)}. "
            f"Leave these keys out, or give a copy of the directory without {MODULES}: the encoder alone"
        )
    return config, told
