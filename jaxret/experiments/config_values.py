"""Names and values of config keys as text, for tables, pictures and folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key where two have the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def format_value(value: Any) -> str:
    """Return a value for a table or a picture: "4,6" for a list, '""' for an empty text."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value) or '""'
