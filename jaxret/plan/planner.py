"""Plans of training, encoding or search with a config for a topology."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxret.models.encoders.fused import require_kernel
from jaxret.parallel.chips import Topology
from jaxret.parallel.mesh import make_mesh
from jaxret.plan import programs
from jaxret.plan.advice import advise, with_changes
from jaxret.plan.compilation import CompiledProgram, compile_for, missing_compiler
from jaxret.plan.estimates import PlanValues, arithmetic, cost, plan_encoding, plan_searching, plan_training
from jaxret.plan.programs import DEFAULT_SEARCH, SearchLoad
from jaxret.plan.start_problems import start_problems
from jaxret.plan.workload import PlanTexts, Workload, measure_workload, read_plan_texts


@dataclass
class Planner:
    """Plans one verb of a config. `on` returns the plan for a topology."""

    verb: str  # train, encode or search
    config: ConfigDict
    name: str  # name of the config
    log: Callable[[str], None]  # prints progress
    utilization: float = 0.4  # expected share of the chips' full rate
    advice: bool = True  # if a step does not fit, whether to compile changes of the config that may help
    search: SearchLoad = DEFAULT_SEARCH  # size of a search; encoding uses its passages, too
    lengths: tuple[int | float, ...] = ()  # mean tokens of queries and passages, for a config without data
    price: float | None = None  # price of a chip in dollars per hour

    def __post_init__(self) -> None:
        self.config = programs.with_stated_settings(self.config)

    @cached_property
    def encoder(self) -> tuple[Path, str]:
        """The folder with the encoder's config.json, and a description of this folder, see `encoder_directory`."""
        return programs.encoder_directory(self.config.encoder.checkpoint)

    @property
    def directory(self) -> Path:
        return self.encoder[0]

    @cached_property
    def texts(self) -> PlanTexts:
        """The texts of the plan, see `read_plan_texts`. They are read once."""
        retriever = programs.retriever_of(self.config, self.directory)
        return read_plan_texts(self.config, self.directory, retriever, self.log, self.lengths)

    def data(self, config: ConfigDict, topology: Topology | None) -> Workload:
        """Measure the work of a config on a topology. Packing depends on both."""
        retriever = programs.retriever_of(config, self.directory)
        return measure_workload(config, retriever, self.texts, self._devices(config, topology) // config.mesh.tensor)

    def _devices(self, config: ConfigDict, topology: Topology | None) -> int:
        return topology.devices if topology else max(config.mesh.fsdp, 1) * config.mesh.tensor

    def on(self, topology: Topology | None) -> PlanValues:
        """Return the plan for a topology, or without chips.

        Raises:
            ValueError: the config cannot be trained on these chips.
            CompileError: the compiler failed.
        """
        head = {"verb": self.verb, "config": self.name, "encoder": self.encoder[1], "topology": str(topology or "")}
        head["attention"] = self.config.encoder.attention
        notes = list(start_problems(self.verb, self.config, topology)) if topology else []
        if self.verb != "search" and topology:
            require_kernel(self.config.encoder.attention, topology.chip.platform)
        if self.verb == "train":
            self._check(self.config, topology)  # before data are read or a program is compiled
            notes += [self.texts.note] if self.texts.note else []
        executable = None
        if topology and (problem := missing_compiler(topology)):
            notes.append(problem)
        elif topology:
            self.log(f"compiling for {topology} ...")
            executable = self._compile(self.config, topology)
        values: PlanValues = {**head, **self._values(topology, executable), "notes": notes}
        if topology and executable and self.verb == "train" and not values["memory"]["fits"] and self.advice:
            values["advice"] = self._advice(topology)
        return values

    def _check(self, config: ConfigDict, topology: Topology | None) -> None:
        devices = jax.devices()[: self._devices(config, topology)]
        make_mesh(config.mesh.fsdp, devices, config.mesh.tensor)  # raises ValueError for impossible sizes
        programs.checked_retriever(config, self.directory)

    def _compile(self, config: ConfigDict, topology: Topology) -> CompiledProgram:
        retriever = programs.retriever_of(config, self.directory)
        on_one_device = self.verb == "search" and retriever.vectors_per_passage is None
        chips = topology.of_host if self.verb == "search" else topology
        chips = Topology(topology.chip, tuple(1 for _ in topology.grid)) if on_one_device else chips
        shapes = self.data(config, topology).shapes if self.verb == "train" else None
        search = self.search.on(retriever, topology)
        return compile_for(chips, programs.describe_program(self.verb, config, self.directory, shapes, search))

    def _values(self, topology: Topology | None, executable: CompiledProgram | None) -> PlanValues:
        config = self.config
        if config.encoder.attention == "cudnn":  # cuDNN's products are invisible, but equal those of plain attention
            config = with_changes(config, {"encoder.attention": "plain"})
        if self.verb == "encode":
            values = plan_encoding(config, self.directory, self.search.passages, topology, executable)
            batches = math.ceil(values["passages"] / values["batch"]["passages"])
            return values | self._cost(values, topology, batches)
        if self.verb == "search":
            return plan_searching(config, self.directory, self.search, topology, executable)
        data = self.data(config, topology)
        values = plan_training(config, self.directory, data.shapes, topology, executable)
        values["data"] = data.values()
        if topology and data.steps is not None:  # the time of a shorter batch is proportional to its tokens
            seconds = arithmetic(values["flops"], topology) / self.utilization * data.share * data.steps
            values |= {"utilization": self.utilization, "hours": seconds / 3600}
            values |= self._cost(values, topology, data.share * data.steps)
        elif self.price is not None:
            self.log("the cost is unknown: data.train or train.steps gives the number of steps")
        return values

    def _cost(self, values: PlanValues, topology: Topology | None, batches: float) -> PlanValues:
        """Return the cost of `batches` batches, or {} without a price."""
        if topology is None or self.price is None:
            return {}
        seconds = arithmetic(values["flops"], topology) * batches
        return {"cost": cost(seconds, topology, self.price, self.utilization)}

    def _advice(self, topology: Topology) -> list[PlanValues]:
        def needs(config: ConfigDict) -> int:
            self._check(config, topology)
            return self._compile(config, topology).total

        self.log("it does not fit; compiling changes of the config that may help ...")
        return [trial._asdict() for trial in advise(self.config, topology, needs)]
