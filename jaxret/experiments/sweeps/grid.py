"""The settings of a sweep, and its grid: values of config keys, and the points that they span."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from jaxret.configs import change_config, require_keys
from jaxret.configs.options import option
from jaxret.experiments.config_values import format_value, short_names
from jaxret.experiments.recipes.evaluation_request import EvaluationRequest
from jaxret.experiments.reproduce.papers import SEEDS
from jaxret.runs.identity import without_seeds
from jaxret.storage.atomic import sha256_json

_PARSERS: dict[type, Any] = {bool: flags.BooleanParser(), int: flags.IntegerParser(), float: flags.FloatParser()}
# Keys that are not part of a run's identity, because data.json has digests of the files. In a sweep, another path
# counts as other data.
_PATHS = ("data.train", "data.dev", "data.dev_negatives_run")


@dataclass(frozen=True)
class Grid:
    """The axes and seeds of a sweep. Without seeds, every point is one run with the seeds of the config."""

    axes: Mapping[str, tuple[Any, ...]]  # config key -> the values that it takes
    seeds: tuple[int, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.axes)

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield {key: value} of every point; the last key varies fastest."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.keys, values, strict=True))

    def label(self, point: Mapping[str, Any]) -> str:
        """Return the name of a point: "chosen=4,6 local_weight=0.1"."""
        names = short_names(self.keys)
        return " ".join(f"{names[key]}={format_value(value)}" for key, value in point.items())

    def folder(self, point: Mapping[str, Any]) -> str:
        """Return the unique name of a point's folder: "chosen=4-6_local_weight=0.1"."""
        names = short_names(self.keys)
        return "_".join(f"{names[key]}={_file_name_part(value)}" for key, value in point.items())


@dataclass(frozen=True)
class SweepSetup:
    """The settings of a sweep."""

    config: str  # "NAME" or "FILE.py", with or without ":SUFFIX"
    overrides: Mapping[str, Any]  # config keys with another value, the same in every point
    grid: Grid  # the swept keys and seeds
    evaluation: EvaluationRequest  # data and measures; the first measure is tested
    # if not, each point trains the config once, on data.train
    stages: bool = option(False, "run the stages of the config, as jaxret recipe does")
    baseline: str = option("", "point with which the others are compared; default: the first")
    diversity: str = option(
        "", "also measure local variation and perplexity, as `jaxret diversity`, on a folder or file of judged pairs"
    )


def read_grid(entries: Sequence[str], seeds: Sequence[str], config: ConfigDict, fixed_keys: Sequence[str]) -> Grid:
    """Read the grid of a command line.

    Args:
        entries: "KEY=VALUE,VALUE" or "KEY=(1,2);(3,4)".
        seeds: values for all keys of `seed.`.
        config: the config whose values have the types of the keys.
        fixed_keys: keys that the command line sets to one value.
    Raises:
        ValueError: a key is unknown, repeated, set by another flag too, or changes no result; a value is repeated or
            has another type.
    """
    if not entries and not seeds:
        raise ValueError("--grid=KEY=VALUE,VALUE must be given, or several --seeds")
    axes: dict[str, tuple[Any, ...]] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not text:
            raise ValueError(f"--grid={entry} must be KEY=VALUE,VALUE, or KEY=(1,2);(3,4) for a key that is a list")
        require_keys(config, [key], "the config")
        if key in axes:
            raise ValueError(f"--grid has {key} twice; write all its values in one")
        if key in fixed_keys:
            raise ValueError(f"{key} is set by --grid and by --config.{key}; remove one")
        if key in SEEDS and seeds:
            raise ValueError(f"{key} is set by --grid and by --seeds; remove one")
        if key not in (*SEEDS, *_PATHS) and not without_seeds({key: 0}):
            raise ValueError(f"{key} changes no result, so a sweep over it has one point")
        axes[key] = _read_values(entry, key, text, config)
    if clash := [key for key in SEEDS if key in fixed_keys and seeds]:
        raise ValueError(f"{clash[0]} is set by --seeds and by --config.{clash[0]}; remove one")
    return Grid(axes, _read_seeds(seeds))


def point_changes(point: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Return the config keys that a point and its seed set."""
    return {**point, **({} if seed is None else dict.fromkeys(SEEDS, seed))}


def require_distinct_points(grid: Grid, configs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise ValueError if two points train the same system.

    A key of `head.FAMILY.` counts only if head.name is that family.

    Args:
        grid: the grid whose keys the error names.
        configs: label of a point -> the flat configs of its stages.
    """
    labels: dict[str, str] = {}
    for label, stages in configs.items():
        digest = sha256_json([list(map(_read_keys, stages))])
        if digest in labels:
            names = sorted({config["head.name"] for config in stages})
            raise ValueError(
                f"the points {labels[digest]!r} and {label!r} of {' and '.join(grid.keys)} are the same system: "
                f"head {' and '.join(names)} reads no key in which they differ"
            )
        labels[digest] = label


def _read_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat config that its family reads."""
    keys = {key: value for key, value in config.items() if key in (*SEEDS, *_PATHS)} | without_seeds(config)
    family = f"head.{config['head.name']}."
    return {key: value for key, value in keys.items() if not re.match(r"head\..*\.", key) or key.startswith(family)}


def _read_seeds(seeds: Sequence[str]) -> tuple[int, ...]:
    values = []
    for text in seeds:
        if not re.fullmatch(r"\d{1,18}", text):
            raise ValueError(
                f"--seeds: {text!r:.60} is not a seed, which is a whole number of at least 0 and at most 18 digits"
            )
        values.append(int(text))
    if duplicates := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"--seeds has {duplicates[0]} twice; a run counts only once")
    return tuple(values)


def _read_values(entry: str, key: str, text: str, config: ConfigDict) -> tuple[Any, ...]:
    current = reduce(getitem, key.split("."), config)
    values = [_read_value(entry, key, part, current) for part in _split_values(text)]
    for value in values:
        change_config(config, {key: value}, "the config")
    if duplicates := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"--grid={entry}: {format_value(duplicates[0])} occurs twice; a point counts only once")
    return tuple(values)


def _split_values(text: str) -> list[str]:
    """Split at semicolons; a text without one is split at commas outside of brackets."""
    if ";" in text:
        return [part.strip() for part in text.split(";")]
    return [part.strip() for part in re.split(r",(?![^(\[]*[)\]])", text)]


def _read_value(entry: str, key: str, text: str, current: Any) -> Any:
    """Return a value of the type that the key has in the config."""
    if isinstance(current, str):
        return text
    try:
        if not isinstance(current, (tuple, list)):
            return _PARSERS[type(current)].parse(text)
        value = ast.literal_eval(text)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    except (ValueError, SyntaxError) as error:
        kinds = {bool: "true or false", int: "a whole number", float: "a number"}
        kind = kinds.get(type(current), "a list, as in (10,12)")
        raise ValueError(f"--grid={entry}: {text!r} is not a value of {key}, which is {kind}") from error


def _file_name_part(value: Any) -> str:
    """Return a value as part of a file name, with a digest if characters had to be replaced."""
    text = "-".join(map(str, value)) if isinstance(value, (tuple, list)) else format_value(value)
    plain = re.sub(r"[^\w.+-]+", "-", text)
    return plain if plain == text and plain else f"{plain}-{sha256_json(text)[:8]}"
