"""Compilation for chips that this machine lacks. The memory, the work and the traffic of the program are read from
XLA's dump.

A separate process compiles (`compile_process.py`), because libtpu can be loaded only once in a process, and fails for
programs that do not fit. The process is killed once buffers are assigned, because generating machine code would take
minutes.
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

from jaxret.parallel.chips import Topology
from jaxret.plan.hlo import Collective, HloModule, collectives, hlo_product_flops, parse_hlo
from jaxret.plan.traffic import traffic

COMPILE_SECONDS = 900  # time limit; a step of BERT-base takes half a minute on two cores
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the metadata server of a TPU VM
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # without this permission, a lock file ends a second process that compiles
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
# Platform -> modules with a compiler, one of which is enough.
COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
REMATERIALIZATION = "involuntary full rematerialization"  # XLA's warning about an array that is moved as a whole
_LAST_FILE = "memory-usage-report.txt"  # XLA writes it after the files that `read_dump` needs
# Kind of an argument of a training step -> pattern of its name in JAX.
_ARGUMENT_KINDS = {
    "moments": "opt_state",
    "moving average": r"\bema\b",
    "frozen parameters": r"\.frozen\b",
    "teacher": r"\.teacher\b",
}
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class CompiledProgram:
    """The memory, the work and the traffic of a program on one device."""

    memory: dict[str, int]  # bytes by kind, whose sum is `total`; temporaries exist only during the step
    collectives: tuple[Collective, ...]
    flops: int  # FLOPs of matrix products
    traffic: float | None  # bytes read from and written to main memory; None: unknown
    warnings: tuple[str, ...]  # warnings of the partitioner about arrays that are moved as a whole

    @property
    def total(self) -> int:
        """The bytes of all kinds of memory together."""
        return sum(self.memory.values())

    @property
    def bytes_moved(self) -> float:
        """The bytes of the results of all collectives."""
        return sum((collective.times * collective.bytes for collective in self.collectives), 0.0)

    @property
    def bytes_sent(self) -> float:
        """A lower bound of the bytes that the device sends."""
        return sum((collective.times * collective.sent for collective in self.collectives), 0.0)

    @property
    def overlap(self) -> float:
        """The share of `sent` that XLA's schedule sends while the device computes products."""
        overlap = sum(
            (collective.times * collective.sent for collective in self.collectives if collective.overlapped), 0.0
        )
        return overlap / max(self.bytes_sent, 1.0)


class CompileError(RuntimeError):
    """The compiler returned no program."""


def missing_compiler(topology: Topology) -> str:
    """Return a sentence that names the compiler to install for these chips, or says that none exists; "" if one is
    installed."""
    if not topology.chip.has_compiler:
        return f"{topology} was not compiled for: temporary memory of a step, and communication, are not in this plan"
    compilers = COMPILERS[topology.chip.platform]
    if any(importlib.util.find_spec(module) is not None for module in compilers):
        return ""
    remedy = "pip install -r requirements-plan.txt, in a separate environment"
    return f"{topology} was not compiled for, because {compilers[0]} is not installed: {remedy}"


def require_compiler(topology: Topology) -> None:
    """Raise ValueError if no compiler for these chips is installed."""
    if problem := missing_compiler(topology):
        raise ValueError(problem)


def compile_for(topology: Topology, job: dict[str, Any]) -> CompiledProgram:
    """Compile a job of `describe_program`. Raises CompileError if the compiler fails, e.g. for an impossible grid."""
    with tempfile.TemporaryDirectory(prefix="jaxret-plan-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "topology": topology.description()}))
        log = _run_compiler(folder, topology)
        return read_dump(folder, topology.devices, log)


def _run_compiler(folder: Path, topology: Topology) -> str:
    """Run the process that compiles until its dump is complete. Return its log and the logs of libtpu."""
    environment = {**os.environ, **ENVIRONMENT, "TPU_LOG_DIR": str(folder / "logs"), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jaxret.plan.compile_process", str(folder / "job.json"), str(folder / "dump")]
    with open(folder / "stderr.txt", "wb") as errors:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            end = time.monotonic() + COMPILE_SECONDS
            while child.poll() is None and not _largest_dump(folder / "dump", _LAST_FILE):
                if time.monotonic() > end:
                    raise CompileError(f"{topology}: the compiler took longer than {COMPILE_SECONDS} s")
                time.sleep(0.1)
        finally:
            child.kill()  # the dump is complete; on SIGTERM, libtpu would print pages of text
            child.wait()
    log = (folder / "stderr.txt").read_text(errors="replace")
    if not _largest_dump(folder / "dump", _LAST_FILE):
        raise CompileError(f"{topology}: {failure_reason(log)}")
    logs = [path.read_text(errors="replace") for path in sorted(folder.glob("logs/*")) if not path.is_symlink()]
    return "\n".join([log, *logs])


def failure_reason(log: str) -> str:
    """Return the last error in the log of a process that returned no program."""
    if lines := [line for line in log.splitlines() if re.match(r"^[\w.]*(Error|Exception)\b", line)]:
        return lines[-1].partition(": ")[2][:500]
    return f"the compiler ended without an error message ({log[-200:].strip()!r})"


def _largest_dump(dump: Path, suffix: str) -> Path | None:
    """Return the largest file of the dump with this suffix, because JAX also compiles small programs."""
    return max(dump.glob(f"*{suffix}"), key=lambda path: path.stat().st_size, default=None)


def read_dump(folder: Path, devices: int, log: str) -> CompiledProgram:
    """Read a `CompiledProgram` from its dump. Raises CompileError if a file of the dump is missing."""
    texts = {}
    for suffix in ("after_optimizations.txt", "buffer-assignment.txt"):
        path = _largest_dump(folder / "dump", suffix)
        if path is None:
            raise CompileError(f"the compiler wrote no {suffix}")
        texts[suffix] = path.read_text()
    module = parse_hlo(texts["after_optimizations.txt"])
    warnings = {partition_warning(line) for line in log.splitlines() if REMATERIALIZATION in line.lower()}
    return CompiledProgram(
        memory=allocated_memory(texts["buffer-assignment.txt"], module),
        collectives=tuple(collectives(module, devices)),
        flops=hlo_product_flops(module),
        traffic=traffic(module),
        warnings=tuple(sorted(warnings)),
    )


def partition_warning(line: str) -> str:
    """Name the operation in a warning of the log."""
    match = re.search(r"op_name=\"([^\"]*)\"", line)
    return f"{REMATERIALIZATION} at {match[1]}" if match else line.strip()[:300]


def allocated_memory(assignment: str, module: HloModule) -> dict[str, int]:
    """Return the bytes of a device's main memory by kind, with the compiler's padding.

    Arguments are classified by their names in JAX. A result in the buffer of an argument counts once.
    """
    names = {}
    for instruction in module.computations[module.entry].values():
        if instruction.opcode == "parameter":
            match = re.search(r'op_name="([^"]*)"', instruction.text)
            names[re.match(r"parameter\((\d+)\)", instruction.text)[1]] = match[1] if match else ""  # type: ignore[index]
    sizes = dict.fromkeys(("parameters", *_ARGUMENT_KINDS, "inputs", "results", "temporaries"), 0)
    for size, description in _ALLOCATION.findall(assignment):
        colour = re.search(r"\bcolor (\d+)", description)
        if colour and colour[1] != "0":  # not the main memory
            continue
        if parameter := re.match(r"parameter (\d+)", description):
            sizes[_argument_kind(names.get(parameter[1], ""))] += int(size)
        else:
            sizes["results" if "maybe-live-out" in description else "temporaries"] += int(size)
    return sizes


def _argument_kind(name: str) -> str:
    """Return the kind of an argument: "arguments[0].opt_state[2].mu['head']" -> "moments"."""
    for kind, pattern in _ARGUMENT_KINDS.items():
        if re.search(pattern, name):
            return kind
    return "parameters" if re.search(r"\bparams\b|\[0\]\[", name.replace("\\", "")) else "inputs"
