"""Options of a command as a frozen dataclass: each field with its default, its help and what it may be.

The command line makes its flags of the fields (`jaxret/cli/flags.py`); functions take the dataclass.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def option(
    default: Any, help: str, choices: tuple[Any, ...] = (), lower_bound: int | float | None = None, flag: str = ""
) -> Any:
    """Return a dataclass field.

    Args:
        default: value of the field, and of its flag.
        help: help text of the flag.
        choices: allowed values; () allows any.
        lower_bound: lowest allowed number.
        flag: name of the flag, where it differs from the field's.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "lower_bound": lower_bound, "flag": flag})


def check_options(options: Any) -> None:
    """Raise ValueError for a field of a dataclass that is not one of its choices, or below its lower bound."""
    for each in fields(options):
        value, metadata = getattr(options, each.name), each.metadata
        if choices := metadata.get("choices"):
            if value not in choices:
                raise ValueError(f"{each.name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
        elif (least := metadata.get("lower_bound")) is not None and value is not None and value < least:
            raise ValueError(f"{each.name} is {value}; it must be at least {least}")
