"""Description of an architecture's Hugging Face files: keys of config.json and names of tensors. The file of each
architecture ends with an `Architecture`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

REQUIRED = object()  # a key without a default


@dataclass(frozen=True)
class Values:
    """The valid values of a key, in words and as a predicate."""

    words: str
    include: Callable[[Any], bool]


def at_least(least: int) -> Values:
    return Values(f"a whole number of at least {least}", lambda v: type(v) is int and v >= least)


def one_of(*choices: Any) -> Values:
    return Values(" or ".join(map(repr, choices)), lambda v: v in choices)


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and low <= v < high


COUNT = at_least(1)
LAYER_COUNT = Values("a whole number from 1 to 10,000", lambda v: type(v) is int and 1 <= v <= 10_000)
POSITIVE = Values("a number above 0", _between(math.nextafter(0.0, 1.0), math.inf))
SPREAD = Values("a number of at least 0", _between(0.0, math.inf))
DROPOUT = Values("a number from 0 to below 1", _between(0.0, 1.0))


@dataclass(frozen=True)
class Key:
    """A key of config.json. The field of our config is its value plus `offset`."""

    name: str
    values: Values = COUNT
    default: Any = REQUIRED
    offset: int = 0


def stored_field(name: str, values: Values = COUNT, default: Any = REQUIRED) -> Any:
    """Return a field of an encoder's config that is a key of config.json."""
    return field(default=MISSING if default is REQUIRED else default, metadata={"key": Key(name, values, default)})


def stored_keys(config: type) -> dict[str, Key]:
    """Return field -> key of config.json, for the fields of a config that `stored_field` made."""
    return {entry.name: entry.metadata["key"] for entry in fields(config) if entry.metadata}


# Options of any config.json that change the computation -> the only implemented value.
PLAIN: dict[str, Any] = {"is_decoder": False, "pruned_heads": {}, "quantization_config": None}


@dataclass(frozen=True)
class Classifier:
    """The head of transformers' class for sequence classification: dense, activation, optional norm, dropout, dense."""

    class_name: str
    dense: str  # name of the first dense module
    score: str  # name of the last dense module
    inside: str = ""  # name prefix of modules that belong to the encoder's class
    dropout_before: bool = False  # whether there is dropout before the first dense module, too
    separators: int = 1  # number of separator tokens between two texts
    activation: str = "tanh"
    norm: str = ""  # name of the norm module; "": no norm
    dense_bias: bool = True  # whether the first dense module has a bias

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return the name prefixes of the head's tensors."""
        return tuple(filter(None, (self.dense, self.norm, self.score)))


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers."""

    model_type: str
    config: Callable[..., Any]  # fields -> our config
    module: Callable[..., Any]  # (config, compute) -> the encoder of protocol.py
    keys: Mapping[str, Key]  # field of our config -> key of config.json
    # config -> {parameter path: tensor name}. A module's name is without suffix, and "{}" is the layer. A parameter
    # with fewer rows than layers has rows for the last layers.
    names: Callable[[Any], Mapping[str, str]]
    class_name: str  # transformers' class of the encoder without a head
    prefix: str = ""  # prefix of every tensor's name in models with a head
    only: Mapping[str, Any] = field(default_factory=dict)  # more options like PLAIN
    # Returns config.json with the keys of `keys`; raises ValueError if that is impossible.
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: raw
    # config -> (field, requirement) of values that conflict
    check: Callable[[Any], Iterator[tuple[str, str]]] = lambda config: iter(())
    extra: Mapping[str, Any] = field(default_factory=dict)  # more keys that transformers needs in config.json
    buffers: tuple[str, ...] = ()  # name prefixes of stored tensors that are not weights of the encoder
    buffer_endings: tuple[str, ...] = ()  # name endings of such tensors
    spell: Callable[[dict[str, Any]], dict[str, Any]] = dict  # the inverse of `translate`
    mlm_head: Callable[..., Any] | None = None  # (config, compute) -> the MLM head
    mlm_class: str = ""  # transformers' class with the MLM head
    mlm_output: str = ""  # name of the MLM head's output matrix, which may be stored although it is the word table
    classifier: Classifier | None = None  # head of a cross-encoder; None: not supported

    def read(self, raw: Mapping[str, Any]) -> Any:
        """Return our config for the content of config.json. Raises ValueError that names a key that is missing, invalid
        or not implemented."""
        for option, only in (PLAIN | dict(self.only)).items():
            if raw.get(option) is not None and raw[option] != only:
                raise ValueError(f"{option} is {raw[option]!r}; only {only!r} is implemented for {self.model_type}")
        raw = self.translate(raw)
        missing_keys = [key.name for key in self.keys.values() if key.default is REQUIRED and key.name not in raw]
        if missing_keys:
            raise ValueError(f"{', '.join(missing_keys)} missing; found {', '.join(sorted(raw))}")
        fields = {}
        for field_name, key in self.keys.items():
            value = raw.get(key.name, key.default)
            if not key.values.include(value):
                raise ValueError(f"{key.name} is {value!r}; it must be {key.values.words}")
            fields[field_name] = value + key.offset if key.offset else value
        config = self.config(**fields, model_type=self.model_type)
        for field_name, requirement in self.check(config):
            key = self.keys[field_name]
            raise ValueError(f"{key.name} is {raw.get(key.name, key.default)!r}; it must {requirement}")
        return config

    def write(self, config: Any) -> dict[str, Any]:
        """Return the content of config.json for our config."""
        with_head = getattr(config, "mlm_head", False)
        raw: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.mlm_class if with_head else self.class_name],
            "torch_dtype": "float32",
            **self.extra,
        }
        for field_name, key in self.keys.items():
            value = getattr(config, field_name)
            raw[key.name] = value - key.offset if key.offset else value
        return self.spell(raw)
