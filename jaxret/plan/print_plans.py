"""Prints a plan (`jaxret plan`).

Functions import JAX after they select the CPU, so that a plan never runs on an accelerator.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs import shared_options
from jaxret.configs.options import option
from jaxret.configs.synonyms import suggest_name
from jaxret.parallel.events import emit

SUBJECTS = ("train", "encode", "search")


@dataclass(frozen=True)
class PlanRequest:
    """The plan to print. Raises ValueError for an unknown subject, a utilization that is not a share, and lengths
    of texts that are not used."""

    subject: str  # one of SUBJECTS
    config: ConfigDict
    config_name: str  # name of the config in the plan
    topologies: tuple[str, ...] = option(
        (), "chips, such as v5e:4x4, v5p:2x2x1, h100:8; several separated by commas", flag="topology", parse=tuple
    )
    utilization: float = option(0.4, "expected share of the chips' full rate, to estimate hours", lower_bound=0.01)
    advice: bool = option(True, "if a step does not fit, compile it with keys that may help")
    # passages, queries, k: size of a search. Encoding uses `passages`, too.
    passages: int = option(1_000_000, "number of passages of the corpus", lower_bound=1)
    queries: int = option(1000, "number of queries", lower_bound=1)
    lengths: tuple[str, ...] = option(
        (), "without data.train: mean tokens of queries and passages, such as 10,80", parse=tuple
    )
    price: float | None = option(None, "dollars per chip and hour, to print the cost of training or encoding")
    precision: str = option("float32", "precision of search candidates, as in jaxret search")
    k: int = shared_options.k()

    def __post_init__(self) -> None:
        if not 0.01 <= self.utilization <= 1:
            raise ValueError(f"--utilization is {self.utilization}; it must be a number from 0.01 to 1")
        if self.subject not in SUBJECTS:
            suggestion = suggest_name(self.subject, SUBJECTS)
            raise ValueError(f"plan {self.subject}: the subject is one of {', '.join(SUBJECTS)}{suggestion}")
        if self.lengths and self.subject != "train":
            raise ValueError(f"--lengths draws texts to train on, and plan {self.subject} has none: remove it")
        if self.lengths and self.config.data.train:
            raise ValueError(
                f"--lengths draws texts in place of data.train, which is {self.config.data.train}: remove one"
            )


def print_plans(request: PlanRequest) -> bool:
    """Print a plan for each topology. Return False if a plan does not fit its chips."""
    _require_price(request)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the process that compiles, too
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)
    import jax

    from jaxret.parallel.chips import parse_topology

    topologies, mesh = [parse_topology(text) for text in request.topologies], request.config.mesh
    # programs are traced for as many devices as the largest topology has
    devices = max([(mesh.fsdp or 1) * mesh.tensor, *(topology.devices for topology in topologies)])
    jax.config.update("jax_num_cpu_devices", devices)
    from jaxret.plan.plan_report import plan_report
    from jaxret.plan.planner import Planner
    from jaxret.plan.programs import SearchLoad
    from jaxret.plan.workload import parse_lengths

    load = SearchLoad(request.passages, request.queries, request.k, request.precision)
    lengths = parse_lengths(list(request.lengths))
    names = (request.subject, request.config, request.config_name)
    planner = Planner(*names, _log, request.utilization, request.advice, load, lengths, request.price)
    plans: list[dict[str, Any]] = []
    for topology in topologies or (None,):
        plans.append(planner.on(topology))
        print(("\n" if len(plans) > 1 else "") + plan_report(plans[-1], topology), flush=True)
        emit("plan", subject=request.subject, topology=topology and str(topology), plan=plans[-1])
    return not any(plan.get("memory", {}).get("fits") is False for plan in plans)


def _require_price(request: PlanRequest) -> None:
    """Raise ValueError for a price that is invalid or not used."""
    if request.price is None:
        return
    if not 0 < request.price < math.inf:
        raise ValueError(f"--price={request.price:g}: it must be the price of a chip in dollars per hour, above 0")
    if request.subject not in ("train", "encode") or not request.topologies:
        raise ValueError(
            "--price is for training and encoding on chips: name them with --topology, as in --topology=v5e:4x4"
        )


def _log(text: str) -> None:
    """Print progress to standard error, because standard output has the plan."""
    print(text, file=sys.stderr, flush=True)
