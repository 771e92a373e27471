"""Flags of the fields of an options dataclass (`jaxret/configs/options.py`)."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from absl import flags

T = TypeVar("T")

flags.disclaim_key_flags()  # a flag belongs to the module of its verb


class OptionFlags(Generic[T]):
    """The flags of a dataclass: one for each field that has a help text, with the field's name, default and type. A
    field that is a dataclass with options contributes the flags of that dataclass. The order is that of the fields.

    Calling it returns the dataclass with the values of the flags. A field with choices becomes a choice of strings. A
    tuple becomes a flag that may be repeated, or whose values are separated by commas. A field `explicit_fields` gets
    the names of the flags on the command line.
    """

    def __init__(self, kind: type[T], **values: Any) -> None:
        """Define the flags of a dataclass. values: other defaults of fields (None: the flag is required), or other
        flags."""
        options: Any = kind
        types = get_type_hints(kind)
        self.kind = kind
        self.options: dict[str, Field[Any]] = {option.name: option for option in fields(options)}
        self.parts: dict[str, flags.FlagHolder | OptionFlags[Any]] = {}
        for name, option in self.options.items():
            value = values.get(name, option.default)
            if isinstance(value, flags.FlagHolder):
                self.parts[name] = value
            elif "help" in option.metadata:
                self.parts[name] = _define(option.metadata["flag"] or name, option, types[name], value)
            elif is_dataclass(types[name]):
                self.parts[name] = OptionFlags(types[name])

    @property
    def holders(self) -> dict[str, flags.FlagHolder]:
        """The flags by their fields, including those of fields that are dataclasses."""
        holders: dict[str, flags.FlagHolder] = {}
        for name, part in self.parts.items():
            holders |= part.holders if isinstance(part, OptionFlags) else {name: part}
        return holders

    def __call__(self, **changes: Any) -> T:
        """Return the dataclass. changes: values of further fields."""
        values = {name: self._value(name) for name in self.parts if name not in changes} | changes
        if "explicit_fields" in self.options:
            values["explicit_fields"] = tuple(name for name, holder in self.holders.items() if holder.present)
        return self.kind(**{name: value for name, value in values.items() if value is not MISSING})

    def _value(self, name: str) -> Any:
        """Return the value of a field; MISSING if its flag has none."""
        part = self.parts[name]
        if isinstance(part, OptionFlags):
            return part()
        if part.value is None:
            return MISSING
        parse = self.options[name].metadata.get("parse") or tuple
        return parse(part.value) if isinstance(part.value, list) else part.value


def define_flag(option: Any) -> flags.FlagHolder:
    """Define the flag of an option that belongs to no dataclass; its type is that of the default."""
    return _define(option.metadata["flag"], option, type(option.default), option.default)


def _define(name: str, option: Field[Any], annotation: Any, default: Any) -> flags.FlagHolder:
    default = None if default is MISSING else default
    kinds = get_args(annotation) or (annotation,)
    help, choices = option.metadata["help"], option.metadata["choices"]
    required = default is None and option.default is not None
    if option.metadata["parse"]:
        return flags.DEFINE_list(name, default and list(default), help, required=required)
    if isinstance(default, tuple):
        return flags.DEFINE_multi_string(name, list(default), help)
    if choices:
        return flags.DEFINE_enum(name, default or None, choices, help, required=required)
    if bool in kinds:
        return flags.DEFINE_bool(name, default, help, required=required)
    if int in kinds or float in kinds:
        define = flags.DEFINE_integer if int in kinds else flags.DEFINE_float
        return define(name, default, help, lower_bound=option.metadata["lower_bound"], required=required)
    return flags.DEFINE_string(name, default, help, required=required)
