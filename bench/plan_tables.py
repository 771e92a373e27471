"""Print the tables of docs/scale.md: plans of the shipped configs, and the needs of corpora by family.

    python bench/plan_tables.py --topology=h100:1,v5e:4x4
    python bench/plan_tables.py --topology=h100:8 --sizes

Steps are compiled for the chips (requirements-plan.txt); the needs of corpora are computed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator
from functools import partial

import jax
from ml_collections import ConfigDict

from jaxret.configs import config_names
from jaxret.parallel.chips import GIB, Topology, parse_topology
from jaxret.plan.compilation import require_compiler
from jaxret.plan.estimates import PlanValues, arithmetic
from jaxret.plan.planner import Planner
from jaxret.plan.programs import QUERY_ROWS, encoder_directory, retriever_of
from jaxret.runs.mismatch import flatten
from jaxret.search.backends.precision import PRECISIONS
from jaxret.search.vectors.streaming import row_bytes

FOR_CPUS = "package:"  # prefix of checkpoints that are small encoders for CPUs
NOT_COMPILED = ("data", "encode", "seed", "validation")  # groups of keys that do not change the program of a step
_LENGTH_KEYS = ("train.steps", "optimizer.warmup_steps")

CORPUS_SIZES = (1_000_000, 8_841_823, 100_000_000)
LENGTH = 80  # tokens of a passage, about the mean of MS MARCO, for families with a vector per token
SEARCH_PRECISIONS = ("float32", "bfloat16", "int8")
CHIP_PRECISIONS = {"float32": "float32 exact"}  # precision of candidates -> precision of chips.PRODUCT_PRECISIONS


def shipped_configs() -> Iterator[tuple[str, ConfigDict]]:
    """Yield (name, config) for every config and each of its SUFFIXES; a name is "recipes/mlr_open_qa:t5"."""
    for name in config_names():
        module = importlib.import_module(f"jaxret.configs.{name.replace('/', '.')}")
        for suffix in getattr(module, "SUFFIXES", ("",)):
            yield (f"{name}:{suffix}", module.get_config(suffix)) if suffix else (name, module.get_config())


def accelerator_configs() -> list[tuple[str, ConfigDict]]:
    """Return the configs of retrievers, except for small encoders for CPUs."""
    retrievers = [(name, config) for name, config in shipped_configs() if config.task == "retrieval"]
    return [(name, config) for name, config in retrievers if not config.encoder.checkpoint.startswith(FOR_CPUS)]


# Plans


def program_key(config: ConfigDict) -> str:
    """Return a key that is equal for configs whose programs differ only in constants.

    For a number such as a learning rate, the key holds whether it is zero. For a checkpoint, it holds the shapes.
    """
    keys = flatten(config.to_dict())
    program_keys = {key: bool(value) if isinstance(value, float) else value for key, value in keys.items()}
    for key in keys:
        if (key.partition(".")[0] in NOT_COMPILED and key != "data.negatives") or key in _LENGTH_KEYS:
            del program_keys[key]
    program_keys["data.pseudo_queries"] = bool(config.data.pseudo_queries)
    program_keys["encoder.checkpoint"] = (encoder_directory(config.encoder.checkpoint)[0] / "config.json").read_text()
    return json.dumps(program_keys, sort_keys=True)


def plan_configs(topologies: list[Topology]) -> Iterator[tuple[str, list[PlanValues]]]:
    """Yield (name, its plan for each topology) for every config for accelerators. Equal programs are compiled once.

    Raises ValueError if a compiler is missing.
    """
    for topology in topologies:
        require_compiler(topology)
    plans: dict[tuple[str, str], PlanValues] = {}
    for name, config in accelerator_configs():
        plan, kind = Planner("train", config, name, _log, advice=False), program_key(config)
        for topology in topologies:
            if (kind, str(topology)) not in plans:
                _log(f"{name}:")
                plans[kind, str(topology)] = plan.on(topology)
        yield name, [plans[kind, str(topology)] for topology in topologies]


def config_table(topologies: list[Topology], plans: Iterator[tuple[str, list[PlanValues]]]) -> Iterator[str]:
    """Yield the lines of a table with the memory of a device and the lower bound of a step's time."""
    yield " | ".join(["| config", *map(str, topologies)]) + " |"
    yield "|:--|" + "--:|" * len(topologies)
    for name, values in plans:
        yield " | ".join([f"| {name}", *map(_plan_cell, values)]) + " |"


def _plan_cell(values: PlanValues) -> str:
    fits = "" if values["memory"]["fits"] else ", does not fit"
    return f"{values['memory']['total'] / GIB:.2f} GiB{fits}, {values['lower_bound']['seconds'] * 1e3:.0f} ms"


# Corpora


def corpus_size_table(topology: Topology) -> Iterator[str]:
    """Yield the lines of a table with a row for each family and number of passages.

    Times are for QUERY_ROWS queries on all chips of the topology.
    """
    headers = [f"{name}, {topology}" for name in SEARCH_PRECISIONS]
    yield " | ".join(["| family (vectors x dimensions)", "passages", "float32 on disk", "float16", *headers]) + " |"
    yield "|:--|--:|--:|--:|" + "--:|" * len(headers)
    for name, vectors, dimension, query_vectors in config_families():
        cell = _vector_cell if query_vectors == 1 else partial(_list_cell, query_vectors)
        for passages in CORPUS_SIZES:
            disk = [f"{passages * vectors * dimension * size / GIB:,.1f} GiB" for size in (4, 2)]
            cells = [cell(passages, vectors, dimension, precision, topology) for precision in SEARCH_PRECISIONS]
            yield " | ".join([f"| {name} ({vectors} x {dimension})", f"{passages:,}", *disk, *cells]) + " |"


def config_families() -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, vectors of a passage, size of a vector, vectors of a query) for the shipped configs.

    Recipes are left out. Configs of one head with equal numbers count once.
    """
    distinct = set()
    for name, config in accelerator_configs():
        retriever = retriever_of(config, encoder_directory(config.encoder.checkpoint)[0])
        numbers = retriever.most_vectors(LENGTH), retriever.dimension
        if not name.startswith("recipes/") and (config.head.name, *numbers) not in distinct:
            distinct.add((config.head.name, *numbers))
            yield name, *numbers, config.tokens.query_length if retriever.late_interaction else 1


def _vector_cell(passages: int, vectors: int, dimension: int, precision: str, topology: Topology) -> str:
    """Return a cell: the memory of a device for its share of the corpus, and the time of a search at full rates."""
    share = math.ceil(passages / topology.devices) * row_bytes((vectors, dimension), PRECISIONS[precision])
    flops = 2 * QUERY_ROWS * passages * vectors * dimension
    seconds = max(_products(flops, precision, topology), share / topology.chip.bandwidth)
    fits = "" if share <= topology.chip.memory else ", streamed"
    return f"{share / GIB:,.1f} GiB{fits}, {seconds * 1e3:,.0f} ms"


def _list_cell(
    query_vectors: int, passages: int, vectors: int, dimension: int, precision: str, topology: Topology
) -> str:
    """Return a cell for passages with lists of vectors, which one device searches in blocks: the time of products."""
    flops = 2 * QUERY_ROWS * query_vectors * passages * vectors * dimension
    return f"blocks, {_products(flops, precision, topology) * topology.devices:,.1f} s"


def _products(flops: int, precision: str, topology: Topology) -> float:
    """Return the seconds that products take on all chips at the full rate."""
    return arithmetic(
        [{"part": "loss", "precision": CHIP_PRECISIONS.get(precision, precision), "flops": flops}], topology
    )


def _log(text: str) -> None:
    """Print progress to standard error, because standard output has the table."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", required=True, help="chips between commas, such as v5e:4x4,h100:8")
    parser.add_argument("--sizes", action="store_true", help="the needs of corpora")
    options = parser.parse_args()
    topologies = [parse_topology(text) for text in options.topology.split(",")]
    os.environ.pop("XLA_FLAGS", None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(topology.devices for topology in topologies))
    tables = (
        map(corpus_size_table, topologies) if options.sizes else [config_table(topologies, plan_configs(topologies))]
    )
    for table in tables:
        for line in table:
            print(line, flush=True)


if __name__ == "__main__":
    main()
