"""The configs of a folder, each as it stands on the chips that it is for: whether all of them fit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.chips import GIB, Topology
from jaxret.contract import flatten
from jaxret.plan.compiled import require_compiler
from jaxret.plan.job import Plan
from jaxret.plan.programs import encoder_directory
from jaxret.shipped import importable

Values = dict[str, Any]
FOR_CPUS = "package:"  # what the checkpoints of small configs begin with, which are for a laptop
NOT_COMPILED = ("data", "encode", "seed", "validation")  # groups of keys that a step's program has nothing of
SCHEDULE = ("train.steps", "optimizer.warmup_steps")


def read_configs(folder: Path) -> Iterator[tuple[str, ConfigDict]]:
    """ "recipes/mlr_open_qa:t5" and its config, for every file of a folder and each of its SUFFIXES."""
    importable()
    for path in sorted(folder.rglob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        name = path.relative_to(folder).with_suffix("").as_posix()
        for suffix in getattr(module, "SUFFIXES", ("",)):
            yield (f"{name}:{suffix}", module.get_config(suffix)) if suffix else (name, module.get_config())


def for_accelerators(folder: Path) -> list[tuple[str, ConfigDict]]:
    """Those of retrievers whose encoder is not a small one for CPUs."""
    found = [(name, c) for name, c in read_configs(folder) if c.task == "retrieval"]
    return [(name, c) for name, c in found if not c.encoder.checkpoint.startswith(FOR_CPUS)]


def program(config: ConfigDict) -> str:
    """The same for two configs whose programs differ in constants at most: of numbers like a learning rate or a weight
    of the loss only whether there is one, of a checkpoint its shapes."""
    keys = flatten(config.to_dict())
    compiled = {key: bool(value) if isinstance(value, float) else value for key, value in keys.items()}
    for key in keys:
        if (key.partition(".")[0] in NOT_COMPILED and key != "data.negatives") or key in SCHEDULE:
            del compiled[key]
    compiled["data.pseudo_queries"] = bool(config.data.pseudo_queries)
    compiled["encoder.checkpoint"] = (encoder_directory(config.encoder.checkpoint)[0] / "config.json").read_text()
    return json.dumps(compiled, sort_keys=True)


def plan_configs(
    folder: Path, topologies: list[Topology], say: Callable[[str], None]
) -> Iterator[tuple[str, list[Values]]]:
    """Of every config that is for accelerators, its plan for each topology. Programs that are alike are compiled once.
    Raises ValueError if a compiler is missing."""
    for topology in topologies:
        require_compiler(topology)
    known: dict[tuple[str, str], Values] = {}
    for name, config in for_accelerators(folder):
        plan, kind = Plan("train", config, name, say, advice=False), program(config)
        for topology in topologies:
            if (kind, str(topology)) not in known:
                say(f"{name}:")
                known[kind, str(topology)] = plan.on(topology)
        yield name, [known[kind, str(topology)] for topology in topologies]


def markdown(topologies: list[Topology], plans: Iterator[tuple[str, list[Values]]]) -> Iterator[str]:
    """The lines of a table, as they become known: memory of a device, and the lower bound of a step."""
    yield " | ".join(["| config", *map(str, topologies)]) + " |"
    yield "|:--|" + "--:|" * len(topologies)
    for name, found in plans:
        yield " | ".join([f"| {name}", *map(_cell, found)]) + " |"


def _cell(values: Values) -> str:
    fits = "" if values["memory"]["fits"] else ", does not fit"
    return f"{values['memory']['total'] / GIB:.2f} GiB{fits}, {values['lower_bound']['seconds'] * 1e3:.0f} ms"
