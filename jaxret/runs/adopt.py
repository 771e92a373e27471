"""What a sentence-transformers directory states becomes the config's, where the config leaves it open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.encoders.sentence_transformers import LENGTHS, MODULES, PROMPTS
from jaxret.models.heads import HEADS

# The keys that a directory decides, and the value of each that counts as not set (that of configs/base.py).
UNSET: dict[str, Any] = {
    **{f"head.{name}.{key}": getattr(head, key) for name, head in HEADS.items() for key in head.STATED},
    "head.token": "cls",
    "normalize": False,
    **dict.fromkeys(LENGTHS.values(), 256),
    **dict.fromkeys(PROMPTS, ""),
}
_OF_VECTORS = ("head.token", "normalize")


def _of_family(key: str) -> str:
    """Whose group of keys "head.NAME.KEY" is in; "" of any other key."""
    parts = key.split(".")
    return parts[1] if parts[0] == "head" and len(parts) == 3 else ""


def family_of(stated: Mapping[str, Any]) -> str:
    """The head whose vectors a directory says it has; "": the one vector of sentence-transformers, or nothing."""
    return next(filter(None, map(_of_family, stated)), "")


def adopt(
    config: ConfigDict, stated: Mapping[str, Any], source: str, given: Iterable[str] = ()
) -> tuple[ConfigDict, list[str]]:
    """A copy of the config with what a directory states where the config says nothing, and what was set, as text.

    A key says nothing if its value is that of configs/base.py, unless it is one of `given`. A length may be shorter
    than stated. A family whose vector is another takes nothing but texts from the directory. Raises ValueError naming
    every key that says something else.
    """
    config, told, problems = ConfigDict(config.to_dict()).lock(), list[str](), list[str]()
    family = family_of(stated)
    if config.head.name in HEADS and not (config.head.name == family if family else HEADS[config.head.name].STOCK):
        stated = {key: value for key, value in stated.items() if key not in _OF_VECTORS and not _of_family(key)}
    meant = set(given)
    for key, value in stated.items():
        value = tuple(value) if isinstance(value, list) else value
        *groups, name = key.split(".")
        place = reduce(getattr, groups, config)
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
