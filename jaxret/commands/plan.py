"""What a config asks of chips that nobody has started yet:

jaxret plan --config=mlr --topology=v5e:4x4                 a training step, and the run
jaxret plan encode --config=... --passages=21015324         encoding a corpus
jaxret plan search --config=... --passages=21015324         searching it
jaxret plan table --config=base                             a table of docs/scale.md: what is watched
jaxret plan table --configs=configs --topology=h100:1       and another: every config of a folder
jaxret plan table --sizes --configs=configs --topology=...  and a third: what corpora need

Exit status 1 if it does not fit. Nothing is executed on an accelerator, and none is needed; docs/scale.md says more.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxret.shipped import nearest

if TYPE_CHECKING:  # neither imports JAX here: a mistake in the flags is told at once
    from jaxret.chips import Topology
    from jaxret.plan.job import Plan

ARGUMENTS = {"[WHAT]": "train (the default), encode, search or table"}
PLANNED = ("train", "encode", "search", "table")

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "what to plan: a shipped config's NAME or a FILE.py; also :SYSTEM"
)
_CONFIGS = flags.DEFINE_string("configs", "", "a folder; with `table`, every config in it as it stands")
_SIZES = flags.DEFINE_boolean("sizes", False, "with `table` and --configs: what corpora need, in bytes and time")
_TOPOLOGY = flags.DEFINE_list("topology", [], "chips, as v5e:4x4, v5p:2x2x1, h100:8; several with commas between")
_JSON = flags.DEFINE_boolean("json", False, "print values instead of text")
_UTILIZATION = flags.DEFINE_float(
    "utilization",
    0.4,
    "part of the full arithmetic rate that is reached; for the hours",
    lower_bound=0.01,
    upper_bound=1,
)
_ADVICE = flags.DEFINE_boolean("advice", True, "where a step does not fit, compile what might")
_PASSAGES = flags.DEFINE_integer("passages", 1_000_000, "of the corpus to encode or search", lower_bound=1)
_QUERIES = flags.DEFINE_integer("queries", 1000, "to search for", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", [], "mean tokens of queries and passages, as 10,80, if data.train is not given")
_PRECISION = flags.DEFINE_string("precision", "float32", "of a search's candidates, as `jaxret search` has it")
_K = flags.DEFINE_integer("k", 100, "passages per query", lower_bound=1)


def main(verb: str = "train") -> None:
    """Prints a plan, for each topology; exits with 1 if one does not fit."""
    if verb not in PLANNED:
        raise ValueError(f"plan {verb}: what is planned is one of {', '.join(PLANNED)}{nearest(verb, PLANNED)}")
    if math.isnan(_UTILIZATION.value):
        raise ValueError("--utilization is nan; it must be a number from 0.01 to 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the compiler ends too
    os.environ["JAX_PLATFORMS"] = "cpu"  # a plan never runs on an accelerator, not even where there is one
    os.environ.pop("XLA_FLAGS", None)
    from jaxret.chips import parse_topology

    topologies = [parse_topology(text) for text in _TOPOLOGY.value]
    if verb == "table" and _SIZES.value:
        return tell_sizes(Path(_CONFIGS.value), topologies)
    if verb == "table" and _CONFIGS.value:
        return tell_shipped(Path(_CONFIGS.value), topologies)
    if _CONFIG.value is None:
        raise ValueError("--config must be given (--help lists the flags)")
    config, name = _CONFIG.value, config_flags.get_config_filename(flags.FLAGS["config"])
    if verb == "table":
        return tell_watched(config, name)
    pretend(topologies, config.mesh.fsdp)
    from jaxret.plan.data import parse_lengths
    from jaxret.plan.job import Plan
    from jaxret.plan.programs import Asked

    asked = Asked(_PASSAGES.value, _QUERIES.value, _K.value, _PRECISION.value)
    lengths = parse_lengths(_LENGTHS.value)
    plan = Plan(verb, config, name, tell, _UTILIZATION.value, _ADVICE.value, asked, lengths)
    show(plan, topologies)


def pretend(topologies: list[Topology], least: int = 1) -> None:
    """As many CPU devices as the largest topology has chips: programs are traced for these."""
    import jax

    jax.config.update("jax_num_cpu_devices", max([least, *(topology.devices for topology in topologies)]))


def tell_watched(config: ConfigDict, name: str) -> None:
    """Prints the table of the programs that are watched."""
    from jaxret.chips import parse_topology
    from jaxret.plan.table import ROWS, markdown

    pretend([parse_topology(row.topology) for row in ROWS])
    from jaxret.plan.job import plan_rows

    for line in markdown(plan_rows(config, name, tell)):
        print(line, flush=True)


def tell_sizes(folder: Path, topologies: list[Topology]) -> None:
    """Prints the table of what corpora need, for each topology."""
    if not topologies or not folder.is_dir():
        raise ValueError(f"--configs={folder} must be a folder, and --topology name the chips to search on")
    from jaxret.plan.sizes import markdown

    for topology in topologies:
        for line in markdown(folder, topology):
            print(line, flush=True)


def tell_shipped(folder: Path, topologies: list[Topology]) -> None:
    """Prints the table of all configs of a folder."""
    if not topologies or not folder.is_dir():
        raise ValueError(f"--configs={folder} must be a folder, and --topology name the chips for what is in it")
    pretend(topologies)
    from jaxret.plan.shipped import markdown, plan_configs

    for line in markdown(topologies, plan_configs(folder, topologies, tell)):
        print(line, flush=True)


def tell(text: str) -> None:
    """Progress, which is no part of the plan."""
    print(text, file=sys.stderr, flush=True)


def show(plan: Plan, topologies: list[Topology]) -> None:
    """Prints a plan for each topology, or for none."""
    from jaxret.plan.report import report

    found: list[dict[str, Any]] = []
    for topology in topologies or (None,):
        found.append(plan.on(topology))
        if not _JSON.value:
            print(("\n" if len(found) > 1 else "") + report(found[-1], topology), flush=True)
    if _JSON.value:
        print(json.dumps(found, indent=2))
    if any(values.get("memory", {}).get("fits") is False for values in found):
        raise SystemExit(1)
