"""Compile one program for chips that this machine lacks: python -m jaxret.plan.compile_process JOB.json DUMP_FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def compile_job(job_file: str, dump: str) -> None:
    """Compile the program of a job file (JSON) for the chips of its topology. XLA writes the compiled program and its
    memory as text files into the folder `dump`."""
    from jax.experimental import topologies

    from jaxret.plan.programs import make_program

    job = json.loads(Path(job_file).read_text())
    description = job["topology"]
    if "chips_per_host_bounds" in description:
        description["chips_per_host_bounds"] = tuple(description["chips_per_host_bounds"])
    devices = topologies.get_topology_desc(**description).devices
    program = make_program(job, devices)
    lowering = program.program.trace(*program.arguments).lower()
    options: dict[str, bool | str] = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
    if description["platform"] == "cuda":  # without a GPU for measurements, XLA has no tile sizes for some products
        options["xla_gpu_enable_triton_gemm"] = False
    lowering.compile(options)


if __name__ == "__main__":
    compile_job(*sys.argv[1:])
