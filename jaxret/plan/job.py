"""From a config and some flags to a plan for each topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxret.chips import Topology, parse_topology
from jaxret.distributed import make_mesh
from jaxret.models.encoders.fused import require_kernel
from jaxret.plan import programs
from jaxret.plan.advice import advise, changed
from jaxret.plan.compiled import Compiled, compile_for, missing
from jaxret.plan.data import Data, read_data
from jaxret.plan.plan import arithmetic, plan_encoding, plan_searching, plan_training
from jaxret.plan.table import COMMON, ROWS, Row

Values = dict[str, Any]


@dataclass
class Plan:
    """What is asked. verb: train, encode or search; name: of the config; say: where progress goes."""

    verb: str
    config: ConfigDict
    name: str
    say: Callable[[str], None]
    utilization: float = 0.4
    advice: bool = True
    passages: int = 1_000_000
    queries: int = 1000
    k: int = 100

    @cached_property
    def encoder(self) -> tuple[Path, str]:
        return programs.encoder_directory(self.config.encoder.checkpoint)

    @property
    def directory(self) -> Path:
        return self.encoder[0]

    @cached_property
    def data(self) -> Data:
        retriever = programs.retriever_of(self.config, self.directory)
        return read_data(self.config, self.directory, retriever, self.say)

    def on(self, topology: Topology | None) -> Values:
        """The plan for these chips. Raises ValueError for a config that could not be trained on them, CompileError if
        the compiler gives no program."""
        head = {"verb": self.verb, "config": self.name, "encoder": self.encoder[1], "topology": str(topology or "")}
        head["attention"] = self.config.encoder.attention
        notes = []
        if self.verb != "search" and topology:
            require_kernel(self.config.encoder.attention, topology.chip.platform)
        if self.verb == "train":
            self._check(self.config, topology)  # what is wrong is told before anything is read or compiled
            notes += [self.data.note] if self.data.note else []
        compiled = None
        if topology and (problem := missing(topology)):
            notes.append(problem)
        elif topology:
            self.say(f"compiling for {topology} ...")
            compiled = self._compile(self.config, topology)
        values: Values = {**head, **self._values(topology, compiled), "notes": notes}
        if topology and compiled and self.verb == "train" and not values["memory"]["fits"] and self.advice:
            values["advice"] = self._advice(topology)
        return values

    def _check(self, config: ConfigDict, topology: Topology | None) -> None:
        devices = jax.devices()[: topology.devices if topology else max(config.mesh.fsdp, 1)]
        programs.checked(config, self.directory, make_mesh(config.mesh.fsdp, devices))

    def _compile(self, config: ConfigDict, topology: Topology) -> Compiled:
        chips = Topology(topology.chip, tuple(1 for _ in topology.grid)) if self.verb == "search" else topology
        shapes = self.data.shapes if self.verb == "train" else None
        return compile_for(chips, programs.job(self.verb, config, self.directory, shapes, self.k))

    def _values(self, topology: Topology | None, compiled: Compiled | None) -> Values:
        config = self.config
        if config.encoder.attention == "cudnn":  # its kernels show no products; those of plain attention are the same
            config = changed(config, {"encoder.attention": "plain"})
        if self.verb == "encode":
            return plan_encoding(config, self.directory, self.passages, topology, compiled)
        if self.verb == "search":
            sizes = self.passages, self.queries, self.k
            return plan_searching(config, self.directory, *sizes, topology, compiled)
        values = plan_training(config, self.directory, self.data.shapes, topology, compiled)
        values["data"] = self.data.values()
        if topology and self.data.steps is not None:
            values |= {"utilization": self.utilization, "hours": self._hours(values, topology, self.data.steps)}
        return values

    def _hours(self, values: Values, topology: Topology, steps: int) -> float:
        """Of all steps; a batch shorter than the longest costs in proportion to its padded tokens."""
        shapes = self.data.shapes
        longest = shapes.queries * shapes.query_length + shapes.documents * shapes.passage_length
        share = self.data.padded / longest if self.data.padded is not None else 1.0
        return arithmetic(values["flops"], topology) / self.utilization * share * steps / 3600

    def _advice(self, topology: Topology) -> list[Values]:
        def needs(config: ConfigDict) -> int:
            self._check(config, topology)
            return self._compile(config, topology).total

        self.say("it does not fit; compiling what might ...")
        return [tried._asdict() for tried in advise(self.config, topology, needs)]


def plan_rows(config: ConfigDict, name: str, say: Callable[[str], None]) -> Iterator[tuple[Row, Values]]:
    """The plan of every row of the table, on `config`. Raises ValueError if a compiler is missing."""
    for row in ROWS:
        topology = parse_topology(row.topology)
        if problem := missing(topology):
            raise ValueError(problem)
        yield row, Plan(row.verb, changed(config, COMMON | row.options), name, say, advice=False).on(topology)
