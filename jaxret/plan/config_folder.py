"""Plans for every config of a folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from ml_collections import ConfigDict

from jaxret.configs import NOT_CONFIGS
from jaxret.parallel.chips import GIB, Topology
from jaxret.plan.compilation import require_compiler
from jaxret.plan.estimates import PlanValues
from jaxret.plan.planner import Planner
from jaxret.plan.programs import encoder_directory
from jaxret.runs.mismatch import flatten

FOR_CPUS = "package:"  # prefix of checkpoints of small encoders for CPUs
NOT_COMPILED = ("data", "encode", "seed", "validation")  # groups of keys that do not change the program of a step
_LENGTH_KEYS = ("train.steps", "optimizer.warmup_steps")


def read_configs(folder: Path) -> Iterator[tuple[str, ConfigDict]]:
    """Yield (name, config) for every file of a folder and each of its SUFFIXES; a name is "recipes/mlr_open_qa:t5"."""
    for path in sorted(folder.rglob("*.py")):
        if path.name in NOT_CONFIGS:
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        name = path.relative_to(folder).with_suffix("").as_posix()
        for suffix in getattr(module, "SUFFIXES", ("",)):
            yield (f"{name}:{suffix}", module.get_config(suffix)) if suffix else (name, module.get_config())


def for_accelerators(folder: Path) -> list[tuple[str, ConfigDict]]:
    """Return the configs of retrievers, except for small encoders for CPUs."""
    retrievers = [(name, config) for name, config in read_configs(folder) if config.task == "retrieval"]
    return [(name, config) for name, config in retrievers if not config.encoder.checkpoint.startswith(FOR_CPUS)]


def program_key(config: ConfigDict) -> str:
    """Return a key that is equal for configs whose programs differ only in constants.

    For a number such as a learning rate, the key holds whether it is zero. For a checkpoint, it holds the shapes.
    """
    keys = flatten(config.to_dict())
    program_keys = {key: bool(value) if isinstance(value, float) else value for key, value in keys.items()}
    for key in keys:
        if (key.partition(".")[0] in NOT_COMPILED and key != "data.negatives") or key in _LENGTH_KEYS:
            del program_keys[key]
    program_keys["data.pseudo_queries"] = bool(config.data.pseudo_queries)
    program_keys["encoder.checkpoint"] = (encoder_directory(config.encoder.checkpoint)[0] / "config.json").read_text()
    return json.dumps(program_keys, sort_keys=True)


def plan_configs(
    folder: Path, topologies: list[Topology], log: Callable[[str], None]
) -> Iterator[tuple[str, list[PlanValues]]]:
    """Yield (name, its plan for each topology) for every config for accelerators. Equal programs are compiled once.

    Raises ValueError if a compiler is missing.
    """
    for topology in topologies:
        require_compiler(topology)
    plans: dict[tuple[str, str], PlanValues] = {}
    for name, config in for_accelerators(folder):
        plan, kind = Planner("train", config, name, log, advice=False), program_key(config)
        for topology in topologies:
            if (kind, str(topology)) not in plans:
                log(f"{name}:")
                plans[kind, str(topology)] = plan.on(topology)
        yield name, [plans[kind, str(topology)] for topology in topologies]


def config_table(topologies: list[Topology], plans: Iterator[tuple[str, list[PlanValues]]]) -> Iterator[str]:
    """Yield the lines of a table with the memory of a device and the lower bound of a step's time."""
    yield " | ".join(["| config", *map(str, topologies)]) + " |"
    yield "|:--|" + "--:|" * len(topologies)
    for name, values in plans:
        yield " | ".join([f"| {name}", *map(_cell, values)]) + " |"


def _cell(values: PlanValues) -> str:
    fits = "" if values["memory"]["fits"] else ", does not fit"
    return f"{values['memory']['total'] / GIB:.2f} GiB{fits}, {values['lower_bound']['seconds'] * 1e3:.0f} ms"
