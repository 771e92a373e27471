"""Flags of the fields of an options dataclass (`jaxret/configs/options.py`)."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from absl import flags

T = TypeVar("T")

flags.disclaim_key_flags()  # a flag belongs to the module of its verb


class OptionFlags(Generic[T]):
    """The flags of a dataclass: one for each field that has a help text, with the field's name, default and type.

    Calling it returns the dataclass with the values of the flags. A field with choices is a choice of strings; a tuple
    is a flag that may be repeated. A field `explicit_fields` has the names of those on the command line.
    """

    def __init__(self, kind: type[T], **defaults: Any) -> None:
        """Define the flags of a dataclass. defaults: of fields, where they differ; None makes a flag required."""
        options: Any = kind
        types = get_type_hints(kind)
        self.kind = kind
        self.holders: dict[str, flags.FlagHolder] = {
            option.name: _define(option, types[option.name], defaults.get(option.name, option.default))
            for option in fields(options)
            if "help" in option.metadata
        }

    def __call__(self, **changes: Any) -> T:
        """Return the dataclass. changes: values of further fields."""
        values = {name: holder.value for name, holder in self.holders.items()} | changes
        kind: Any = self.kind
        if "explicit_fields" in {option.name for option in fields(kind)}:
            values["explicit_fields"] = tuple(name for name, holder in self.holders.items() if holder.present)
        return self.kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _define(field: Field[Any], annotation: Any, default: Any) -> flags.FlagHolder:
    default = None if default is MISSING else default
    kinds = get_args(annotation) or (annotation,)
    name, help = field.metadata["flag"] or field.name, field.metadata["help"]
    required = default is None and NoneType not in kinds
    if isinstance(default, tuple):
        return flags.DEFINE_multi_string(name, list(default), help)
    if field.metadata["choices"]:
        return flags.DEFINE_enum(name, default, field.metadata["choices"], help, required=required)
    if bool in kinds:
        return flags.DEFINE_bool(name, default, help, required=required)
    if int in kinds or float in kinds:
        define = flags.DEFINE_integer if int in kinds else flags.DEFINE_float
        return define(name, default, help, lower_bound=field.metadata["lower_bound"], required=required)
    return flags.DEFINE_string(name, default, help, required=required)
