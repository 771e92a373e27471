"""How Hugging Face's files hold an encoder: the keys of config.json, the names of tensors. Every architecture's file
ends with an `Architecture`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()  # a key without a default


@dataclass(frozen=True)
class Values:
    """What a key may hold, in words and as a test."""

    words: str
    include: Callable[[Any], bool]


def at_least(least: int) -> Values:
    return Values(f"a whole number of at least {least}", lambda v: type(v) is int and v >= least)


def one_of(*choices: Any) -> Values:
    return Values(" or ".join(map(repr, choices)), lambda v: v in choices)


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and low <= v < high


COUNT = at_least(1)
POSITIVE = Values("a number above 0", _between(math.nextafter(0.0, 1.0), math.inf))
SPREAD = Values("a number of at least 0", _between(0.0, math.inf))
DROPOUT = Values("a number from 0 to below 1", _between(0.0, 1.0))


@dataclass(frozen=True)
class Key:
    """A key of config.json; the field of ours that it stands for is its value plus `offset`."""

    name: str
    values: Values = COUNT
    default: Any = REQUIRED
    offset: int = 0


# What may be in any config.json and changes the computation, with the only value that is computed here.
PLAIN: dict[str, Any] = {"is_decoder": False, "pruned_heads": {}, "quantization_config": None}


def _as_it_is(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw


def _nothing(_: Any) -> Iterator[tuple[str, str]]:
    return iter(())


@dataclass(frozen=True)
class Classifier:
    """The head of transformers' class for sequence classification: dense, activation, perhaps a norm, dropout, and a
    product.

    dense, norm, score: names of its modules. inside: what begins the names of those that are part of the encoder's own
    class. dropout_before: whether there is dropout before the dense layer, too. separators: markers between two texts.
    """

    class_name: str
    dense: str
    score: str
    inside: str = ""
    dropout_before: bool = False
    separators: int = 1
    activation: str = "tanh"
    norm: str = ""
    dense_bias: bool = True

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of its tensors begin with."""
        return tuple(filter(None, (self.dense, self.norm, self.score)))


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers.

    config, module: what is made of it (`module(config, compute)`; see protocol.py). keys: our field -> its key.
    only: options, besides PLAIN, that change the computation, and the one value of each that is computed here.
    translate: config.json -> the same in the spelling of `keys`; raises ValueError for what cannot be said so. check:
    config -> (field, what would be right) of every value that does not go with the others. extra: what transformers
    must find in config.json besides.

    names: config -> {parameter path: tensor name}; a module's name is without suffix, and "{}" is the layer (a
    parameter with fewer rows than there are layers has those of the last ones). prefix: what models with a head put
    before every name. buffers: name prefixes of what is stored but is no weight. class_name, mlm_class: transformers'
    name of the encoder alone, and with the MLM head. mlm_head: the module of that head; mlm_output: where its output
    matrix may be stored although it is the word table. classifier: the head of a cross-encoder; None: not here.
    """

    model_type: str
    config: Callable[..., Any]
    module: Callable[..., Any]
    keys: Mapping[str, Key]
    names: Callable[[Any], Mapping[str, str]]
    class_name: str
    prefix: str = ""
    only: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_it_is
    check: Callable[[Any], Iterator[tuple[str, str]]] = _nothing
    extra: Mapping[str, Any] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    mlm_head: Callable[..., Any] | None = None
    mlm_class: str = ""
    mlm_output: str = ""
    classifier: Classifier | None = None

    def read(self, raw: Mapping[str, Any]) -> Any:
        """The content of config.json -> our config. Raises ValueError naming the key that is missing, that holds
        nonsense, or that asks for what is not implemented."""
        for option, only in (PLAIN | dict(self.only)).items():
            if raw.get(option) is not None and raw[option] != only:
                raise ValueError(f"{option} is {raw[option]!r}; only {only!r} is implemented for {self.model_type}")
        raw = self.translate(raw)
        missing = [key.name for key in self.keys.values() if key.default is REQUIRED and key.name not in raw]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing; found {', '.join(sorted(raw))}")
        fields = {}
        for ours, key in self.keys.items():
            value = raw.get(key.name, key.default)
            if not key.values.include(value):
                raise ValueError(f"{key.name} is {value!r}; it must be {key.values.words}")
            fields[ours] = value + key.offset if key.offset else value
        config = self.config(**fields, model_type=self.model_type)
        for ours, wanted in self.check(config):
            key = self.keys[ours]
            raise ValueError(f"{key.name} is {raw.get(key.name, key.default)!r}; it must {wanted}")
        return config

    def write(self, config: Any) -> dict[str, Any]:
        """Our config -> the content of config.json."""
        with_head = getattr(config, "mlm_head", False)
        raw: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.mlm_class if with_head else self.class_name],
            "torch_dtype": "float32",
            **self.extra,
        }
        for ours, key in self.keys.items():
            value = getattr(config, ours)
            raw[key.name] = value - key.offset if key.offset else value
        return raw
