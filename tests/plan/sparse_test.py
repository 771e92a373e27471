"""Search of sparse vectors, compiled for chips that are absent: it fits, and devices exchange only results."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jaxret.configs import load_config
from jaxret.parallel.chips import parse_topology
from jaxret.plan.compilation import ENVIRONMENT, missing_compiler
from jaxret.plan.programs import DEFAULT_SEARCH, encoder_directory, search_program
from jaxret.search.backends.sparse_xla import QUERIES_AT_ONCE, TILE_PRODUCTS
from jaxret.search.vectors.inverted_lists import BLOCK_PASSAGES
from tests.pipeline import REPOSITORY, environment

WORDS, VOCABULARY, K = 256, 30_522, 1000
PROGRAM = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxret.parallel.chips import parse_topology
from jaxret.search.backends.accelerators import ROW_AXIS
from jaxret.search.backends.sparse_xla import search_sparse

name, rows, words, vocabulary, queries, k = sys.argv[1], *map(int, sys.argv[2:])
description = parse_topology(name).description()
if "chips_per_host_bounds" in description:
    description["chips_per_host_bounds"] = tuple(description["chips_per_host_bounds"])
devices = topologies.get_topology_desc(**description).devices
mesh = Mesh(np.array(devices).reshape(-1), (ROW_AXIS,), axis_types=(AxisType.Auto,))

def array(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

arguments = (
    array((vocabulary, queries), jnp.float32, P()),
    array((rows, words), jnp.int32, P(ROW_AXIS)),
    array((rows, words), jnp.float32, P(ROW_AXIS)),
)
compiled = search_sparse.lower(*arguments, k, mesh).compile()
travels = re.compile(r" all-(gather|reduce|to-all)(-start)?\\(")
lines = [line for line in compiled.as_text().splitlines() if travels.search(line)]
shapes = [shape for line in lines for shape in re.findall(r"\\w+\\[([0-9,]+)\\]", line.split("(%")[0])]
numbers = [int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes]
print(json.dumps([compiled.memory_analysis().temp_size_in_bytes, len(devices), max(numbers, default=0)]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("chips", ["h100:1", "h100:8", "v5e:2x2"])
def test_a_block_fits_and_devices_exchange_only_results(chips: str) -> None:
    if problem := missing_compiler(parse_topology(chips)):
        pytest.skip(problem)
    numbers = [str(number) for number in (BLOCK_PASSAGES, WORDS, VOCABULARY, QUERIES_AT_ONCE, K)]
    variables = {**environment(), **ENVIRONMENT, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, chips, *numbers], cwd=REPOSITORY, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    temporaries, devices, largest = json.loads(done.stdout.splitlines()[-1])
    scores = BLOCK_PASSAGES // devices * QUERIES_AT_ONCE * 4
    assert temporaries <= 2 * scores + 2 * TILE_PRODUCTS * 4
    assert (largest > 0) == (devices > 1)
    # The k results of each device, rounded up; no scores of all passages.
    assert largest <= devices * QUERIES_AT_ONCE * 1024


def test_plan_names_what_it_cannot_plan() -> None:
    config = load_config("splade")
    with pytest.raises(ValueError, match=r"weights .*words, .*search"):
        search_program(config, encoder_directory(config.encoder.checkpoint)[0], DEFAULT_SEARCH, [])
