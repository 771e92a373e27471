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
from jaxret.plan.compiled import Compiled, compile_for, missing, require_compiler
from jaxret.plan.data import Data, Texts, look, read_texts
from jaxret.plan.plan import arithmetic, plan_encoding, plan_searching, plan_training
from jaxret.plan.programs import ASKED, Asked
from jaxret.plan.table import COMMON, ROWS, Row

Values = dict[str, Any]


@dataclass
class Plan:
    """What is asked. verb: train, encode or search; name: of the config; say: where progress goes; asked: of a search,
    and the passages to encode; lengths: mean tokens of queries and of passages, where there is no data."""

    verb: str
    config: ConfigDict
    name: str
    say: Callable[[str], None]
    utilization: float = 0.4
    advice: bool = True
    asked: Asked = ASKED
    lengths: tuple[int | float, ...] = ()

    def __post_init__(self) -> None:
        self.config = programs.as_stated(self.config)

    @cached_property
    def encoder(self) -> tuple[Path, str]:
        return programs.encoder_directory(self.config.encoder.checkpoint)

    @property
    def directory(self) -> Path:
        return self.encoder[0]

    @cached_property
    def texts(self) -> Texts:
        retriever = programs.retriever_of(self.config, self.directory)
        return read_texts(self.config, self.directory, retriever, self.say, self.lengths)

    def data(self, config: ConfigDict, topology: Topology | None) -> Data:
        """Of this config, or one with other keys, on these chips: where rows are packed depends on both."""
        retriever = programs.retriever_of(config, self.directory)
        return look(config, retriever, self.texts, self._devices(config, topology))

    def _devices(self, config: ConfigDict, topology: Topology | None) -> int:
        return topology.devices if topology else max(config.mesh.fsdp, 1)

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
            notes += [self.texts.note] if self.texts.note else []
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
        make_mesh(config.mesh.fsdp, jax.devices()[: self._devices(config, topology)])  # or says why not
        programs.checked(config, self.directory)

    def _compile(self, config: ConfigDict, topology: Topology) -> Compiled:
        retriever = programs.retriever_of(config, self.directory)
        alone = self.verb == "search" and retriever.vectors_per_passage is None
        chips = Topology(topology.chip, tuple(1 for _ in topology.grid)) if alone else topology
        shapes = self.data(config, topology).shapes if self.verb == "train" else None
        asked = self.asked.on(retriever, topology)
        return compile_for(chips, programs.job(self.verb, config, self.directory, shapes, asked))

    def _values(self, topology: Topology | None, compiled: Compiled | None) -> Values:
        config = self.config
        if config.encoder.attention == "cudnn":  # its kernels show no products; those of plain attention are the same
            config = changed(config, {"encoder.attention": "plain"})
        if self.verb == "encode":
            return plan_encoding(config, self.directory, self.asked.passages, topology, compiled)
        if self.verb == "search":
            asked = self.asked.on(programs.retriever_of(config, self.directory), topology)
            return plan_searching(config, self.directory, asked, topology, compiled)
        data = self.data(config, topology)
        values = plan_training(config, self.directory, data.shapes, topology, compiled)
        values["data"] = data.values()
        if topology and data.steps is not None:  # a batch shorter than the longest costs in proportion to its tokens
            seconds = arithmetic(values["flops"], topology) / self.utilization * data.share * data.steps
            values |= {"utilization": self.utilization, "hours": seconds / 3600}
        return values

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
        require_compiler(topology)
        plan = Plan(
            row.verb,
            changed(config, COMMON | row.options),
            name,
            say,
            advice=False,
            asked=row.asked,
            lengths=row.lengths,
        )
        yield row, plan.on(topology)
