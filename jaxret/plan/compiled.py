"""Compiling for chips that are not there, and what XLA's dump says of the program.

A process of its own compiles (`child.py`): libtpu can be loaded once in a process, and it says what does not fit by
failing. It is ended as soon as buffers are assigned, because the machine code that follows takes minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.chips import Topology
from jaxret.plan.hlo import Collective, Module, collectives, parse, product_flops
from jaxret.plan.traffic import traffic

LIMIT = 900  # seconds; a BERT-base step takes half a minute on two cores
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # the metadata server of a TPU VM
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that compiles ends on a lock file
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}  # one of each is enough
SPLIT = "involuntary full rematerialization"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """A program on one device. memory: bytes by kind, `temporaries` being what lives during the step; they add up to
    `total`. flops: of matrix products. traffic: bytes read from main memory and written there; None if
    unknown. warnings: of the partitioner, that it moves a whole array."""

    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    flops: int
    traffic: float | None
    warnings: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def moved(self) -> float:
        """Bytes of the results of all collectives."""
        return sum((c.times * c.bytes for c in self.collectives), 0.0)

    @property
    def sent(self) -> float:
        """Bytes that the device sends at least."""
        return sum((c.times * c.sent for c in self.collectives), 0.0)


class CompileError(RuntimeError):
    """The compiler gave no program."""


def missing(topology: Topology) -> str:
    """What to install to compile for these chips; "" if it is there."""
    compilers = COMPILERS[topology.chip.platform]
    if any(importlib.util.find_spec(module) is not None for module in compilers):
        return ""
    remedy = "pip install -r requirements-plan.txt, in an environment of its own"
    return f"{topology} was not compiled for, because {compilers[0]} is not installed: {remedy}"


def require_compiler(topology: Topology) -> None:
    """Raises ValueError if these chips cannot be compiled for here."""
    if problem := missing(topology):
        raise ValueError(problem)


def compile_for(topology: Topology, job: dict[str, Any]) -> Compiled:
    """Compiles a job of `programs.job`. Raises CompileError if there is no program, as for a grid that there is not."""
    with tempfile.TemporaryDirectory(prefix="jaxret-plan-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "topology": topology.description()}))
        log = _run(folder, topology)
        return read(folder, topology.devices, log)


def _run(folder: Path, topology: Topology) -> str:
    """Runs the child until its dump is complete; what it and libtpu wrote to their logs."""
    environment = {**os.environ, **ENVIRONMENT, "TPU_LOG_DIR": str(folder / "logs"), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jaxret.plan.child", str(folder / "job.json"), str(folder / "dump")]
    with open(folder / "stderr.txt", "wb") as errors:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            end = time.monotonic() + LIMIT
            while child.poll() is None and not _complete(folder / "dump"):
                if time.monotonic() > end:
                    raise CompileError(f"{topology}: the compiler took longer than {LIMIT} s")
                time.sleep(0.1)
        finally:
            child.kill()  # it has nothing more to say; libtpu answers a SIGTERM with pages
            child.wait()
    log = (folder / "stderr.txt").read_text(errors="replace")
    if not _dumped(folder / "dump", "memory-usage-report.txt"):
        raise CompileError(f"{topology}: {reason(log)}")
    logs = [path.read_text(errors="replace") for path in sorted(folder.glob("logs/*")) if not path.is_symlink()]
    return "\n".join([log, *logs])


def reason(log: str) -> str:
    """Of a child that gave no program: its last error."""
    lines = [line for line in log.splitlines() if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    return (
        lines[-1].partition(": ")[2][:500] if lines else f"the compiler ended without a word ({log[-200:].strip()!r})"
    )


def _dumped(dump: Path, suffix: str) -> Path | None:
    """The dumped file of the largest program: JAX compiles small ones on its way."""
    return max(dump.glob(f"*{suffix}"), key=lambda path: path.stat().st_size, default=None)


def _complete(dump: Path) -> bool:
    """Whether everything that `read` needs is written: this file is begun after those."""
    return _dumped(dump, "memory-usage-report.txt") is not None


def read(folder: Path, devices: int, log: str) -> Compiled:
    """What a dump says."""
    texts = {}
    for suffix in ("after_optimizations.txt", "buffer-assignment.txt"):
        path = _dumped(folder / "dump", suffix)
        if path is None:
            raise CompileError(f"the compiler wrote no {suffix}")
        texts[suffix] = path.read_text()
    module = parse(texts["after_optimizations.txt"])
    return Compiled(
        memory=memory(texts["buffer-assignment.txt"], module),
        collectives=tuple(collectives(module, devices)),
        flops=product_flops(module),
        traffic=traffic(module),
        warnings=tuple(sorted({warning(line) for line in log.splitlines() if SPLIT in line.lower()})),
    )


def warning(line: str) -> str:
    """Of a line of the log: which operation is meant."""
    found = re.search(r"op_name=\"([^\"]*)\"", line)
    return f"{SPLIT} at {found[1]}" if found else line.strip()[:300]


def memory(assignment: str, module: Module) -> dict[str, int]:
    """Bytes of a device's main memory by kind, padded as the compiler lays them out.

    Arguments go by the names that JAX gave them; what is given back in the same place counts once.
    """
    names = {}
    for instruction in module.computations[module.entry].values():
        if instruction.opcode == "parameter":
            found = re.search(r'op_name="([^"]*)"', instruction.rest)
            names[re.match(r"parameter\((\d+)\)", instruction.rest)[1]] = found[1] if found else ""  # type: ignore[index]
    sizes = {"parameters": 0, "moments": 0, "moving average": 0, "inputs": 0, "results": 0, "temporaries": 0}
    for size, what in _ALLOCATION.findall(assignment):
        color = re.search(r"\bcolor (\d+)", what)
        if color and color[1] != "0":  # memory on the chip
            continue
        if parameter := re.match(r"parameter (\d+)", what):
            sizes[_argument(names.get(parameter[1], ""))] += int(size)
        else:
            sizes["results" if "maybe-live-out" in what else "temporaries"] += int(size)
    return sizes


def _argument(name: str) -> str:
    """ "arguments[0].opt_state[2].mu['head']" -> "moments"."""
    if "opt_state" in name:
        return "moments"
    if re.search(r"\bema\b", name):
        return "moving average"
    return "parameters" if re.search(r"\bparams\b|\[0\]\[", name.replace("\\", "")) else "inputs"
