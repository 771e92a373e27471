"""Options of a command as a frozen dataclass. Each field has a default, a help text and allowed values.

The command line makes a flag of each field (`jaxret/cli/flags.py`); functions take the dataclass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

TOO_LARGE = 10**18  # smaller numbers fit into 64 bits


def option(
    default: Any,
    help: str,
    choices: tuple[Any, ...] = (),
    lower_bound: int | float | None = None,
    flag: str = "",
    parse: Callable[[list[str]], Any] | None = None,
) -> Any:
    """Return a dataclass field.

    Args:
        default: value of the field, and of its flag; MISSING if it must be given.
        help: help text of the flag.
        choices: allowed values; () allows any.
        lower_bound: lowest allowed number.
        flag: name of the flag, where it differs from the field's.
        parse: parser of one value of a flag whose values are separated by commas; without it, the flag is repeated.
    """
    metadata = {"help": help, "choices": choices, "lower_bound": lower_bound, "flag": flag, "parse": parse}
    return field(default=default, metadata=metadata)


def given_fields(options: Any, names: Iterable[str], explicit: Container[str] = ()) -> list[str]:
    """Return those of some fields of a dataclass whose value was given: it is not the default, or the name is in
    `explicit`, the names on a command line."""
    defaults = {option.name: option.default for option in fields(options)}
    return [name for name in names if name in explicit or getattr(options, name) != defaults[name]]


def check_options(options: Any) -> None:
    """Raise ValueError for a field whose value has another type than its annotation, is not one of its choices, is
    below its lower bound, or is not finite. Numbers of NumPy become Python's."""
    hints = get_type_hints(type(options))
    for option in fields(options):
        value, metadata = getattr(options, option.name), option.metadata
        if isinstance(value, int) and abs(value) >= TOO_LARGE:  # Python does not even write one of 5,000 digits
            raise ValueError(f"{option.name} is a number of more than 18 digits")
        if not _fits(value, hints[option.name]):
            raise ValueError(f"{option.name} is {value!r:.60}; it must be {_describe_type(hints[option.name])}")
        if isinstance(value, Real) and not isinstance(value, int | float):  # JSON cannot hold numbers of NumPy
            value = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(options, option.name, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{option.name} is {value}; it must be a finite number")
        if choices := metadata.get("choices"):
            if value not in choices:
                raise ValueError(f"{option.name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
        elif (least := metadata.get("lower_bound")) is not None and value is not None and value < least:
            raise ValueError(f"{option.name} is {value}; it must be at least {least}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation; a list is accepted for a tuple."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe_type(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe_type, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a tuple of " + {str: "texts", int: "whole numbers"}.get(get_args(hint)[0], "values")
    names = {str: "a text", int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
