"""The merge of several hosts' results, compiled for chips that are absent: only scores and rows are sent, once to each
host."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jaxret.configs import load_config
from jaxret.parallel.chips import parse_topology
from jaxret.plan.compilation import ENVIRONMENT, missing_compiler
from jaxret.plan.estimates import host_needs
from jaxret.plan.programs import SearchLoad, encoder_directory, retriever_of
from tests.pipeline import REPOSITORY, environment

# The program of jax.experimental.multihost_utils.process_allgather.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxret.parallel.chips import parse_topology
from jaxret.plan.hlo import collectives, parse_hlo

name, queries, k = sys.argv[1], *map(int, sys.argv[2:])
topology = parse_topology(name)
devices = topologies.get_topology_desc(**topology.description()).devices
mesh = Mesh(np.array(devices).reshape(topology.hosts, -1), ("processes", "local_devices"))
own = NamedSharding(mesh, P("processes"))
hits = [((topology.hosts, queries, k), jnp.float32), ((topology.hosts, queries, 2 * k), jnp.uint32)]
moved = []
for shape, dtype in hits:
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    compiled = gather.lower(jax.ShapeDtypeStruct(shape, dtype, sharding=own)).compile()
    moved += [(c.kind, c.times * c.bytes) for c in collectives(parse_hlo(compiled.as_text()), len(devices))]
print(json.dumps(moved))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("chips", ["v5e:4x4", "h100:32"])
def test_the_merge_moves_what_the_plan_says(chips: str) -> None:
    if problem := missing_compiler(parse_topology(chips)):
        pytest.skip(problem)
    variables = {**environment(), **ENVIRONMENT, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    command = [sys.executable, "-c", PROGRAM, chips, "128", "1000"]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    moved = json.loads(done.stdout.splitlines()[-1])
    config = load_config("base")
    load = SearchLoad(1_000_000, 128, 1000)
    load = load.on(retriever_of(config, encoder_directory(config.encoder.checkpoint)[0]), parse_topology(chips))
    assert {kind for kind, _ in moved} == {"all-gather"}
    assert sum(size for _, size in moved) == host_needs(load, parse_topology(chips).hosts, 0)["received_bytes"]
