"""Names and values of config keys as text, for tables, pictures and folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return key -> its last part, or the whole key if another key has the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def flag_text(value: Any) -> str:
    """Return a value as a flag takes it: "4,6" for a list."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def format_value(value: Any) -> str:
    """Return a value for a table or a picture: "4,6" for a list, "2" for 2.0, '""' for an empty text."""
    if value == "":
        return '""'
    return flag_text(value).removesuffix(".0") if isinstance(value, float) else flag_text(value)
