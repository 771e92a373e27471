"""Estimates of what training, encoding and search need on chips, as values for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxret.models.lora import with_adapters
from jaxret.models.model import parameter_shapes
from jaxret.models.partition import divide_parameters, frozen_pattern
from jaxret.models.retriever_model import RetrieverModel
from jaxret.parallel import flops as counting
from jaxret.parallel.chips import Topology
from jaxret.plan import programs
from jaxret.plan.compilation import CompiledProgram
from jaxret.plan.programs import SearchLoad
from jaxret.search.backends.precision import find_precision
from jaxret.search.proof import MARGIN, PASS_CANDIDATES, first_depth
from jaxret.search.vectors.process_group import HIT_BYTES
from jaxret.search.vectors.single_vector import BLOCK_ROWS
from jaxret.training.optimizers import make_optimizer
from jaxret.training.train_state import checkpoint_trees, make_update_rule
from jaxret.types import VECTOR_DTYPES

PlanValues = dict[str, Any]  # the JSON object of a plan, or a part of one
COST_SHARES = (0.2, 0.4, 0.6)  # shares of the full rate: for small batches or models, usual, and for large ones


def count_numbers(tree: Any) -> int:
    """Count the numbers in a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def parameter_counts(retriever: RetrieverModel) -> PlanValues:
    """Return the numbers of parameters of each part and in total."""
    params = parameter_shapes(retriever)
    return {**{name: count_numbers(part) for name, part in params.items()}, "total": count_numbers(params)}


def program_work(program: programs.AbstractProgram) -> list[PlanValues]:
    """Return the FLOPs of one run of a program by part, phase and precision, for all devices together."""
    flops = counting.count_flops(program.program.trace(*program.arguments))
    order = {name: rank for rank, name in enumerate((*counting.PROGRAM_PARTS, *counting.PHASES))}
    kinds = sorted(flops, key=lambda kind: (order[kind.part], order[kind.phase], kind.precision))
    return [{**kind._asdict(), "flops": flops[kind]} for kind in kinds]


def optimizer_work(config: ConfigDict, retriever: RetrieverModel) -> PlanValues:
    """Return the operations of the optimizer in a step, one for each number that it computes."""
    optimizer, _ = make_optimizer(config.optimizer, 1000)
    params, _ = divide_parameters(parameter_shapes(retriever), frozen_pattern(config))
    state = jax.eval_shape(optimizer.init, params)
    operations = counting.count_elementwise(optimizer.update, params, state, params)
    return {"part": "optimizer", "phase": "forward", "precision": "float32", "flops": operations}


def products(kinds: list[PlanValues]) -> list[PlanValues]:
    """Return the kinds of products. The optimizer has none: its operations are elementwise, bound by memory traffic."""
    return [kind for kind in kinds if kind["part"] != "optimizer"]


def total_flops(kinds: list[PlanValues]) -> int:
    """Return the FLOPs of all products, without the optimizer's operations."""
    return sum(kind["flops"] for kind in products(kinds))


def arithmetic(kinds: list[PlanValues], topology: Topology) -> float:
    """Return the seconds that products take at the full rates of the chips."""
    rates = topology.chip.rates
    return sum((kind["flops"] / rates[kind["precision"]] for kind in products(kinds)), 0.0) / topology.devices


def cost(seconds: float, topology: Topology, price: float, utilization: float) -> PlanValues:
    """Return the cost of work in dollars, at several shares of the chips' full rate.

    Args:
        seconds: seconds of the products at the full rate.
        price: price of a chip in dollars per hour.
        utilization: expected share of the full rate, which is listed with COST_SHARES.
    """
    full_price = seconds * topology.devices / 3600 * price
    shares = sorted({*COST_SHARES, utilization})
    return {"price": price, "dollars": [{"utilization": share, "dollars": full_price / share} for share in shares]}


def lower_bound(
    kinds: list[PlanValues], topology: Topology, traffic: int | float, executable: CompiledProgram | None
) -> PlanValues:
    """Return a lower bound of a program's seconds: the maximum of arithmetic, memory and links at full rates.

    Args:
        kinds: FLOPs from `program_work`.
        traffic: lower bound of the bytes that a device reads and writes.
        executable: the compiled program, whose collectives give the time of links; None: links are ignored.
    """
    chip = topology.chip
    parts = {"arithmetic": arithmetic(kinds, topology), "memory": traffic / chip.bandwidth}
    if executable is not None:
        parts["links"] = executable.bytes_sent / chip.link
    return {**parts, "seconds": max(parts.values())}


def device_memory(
    program: programs.AbstractProgram, topology: Topology, executable: CompiledProgram | None, training: bool
) -> PlanValues:
    """Return the bytes that a device needs, and whether they fit.

    Args:
        program: the program, whose state is in memory.
        executable: the compiled program; None: the result is a lower bound, and `fits` is False or None (unknown).
        training: whether the program computes gradients.
    """
    usable = topology.chip.memory
    if executable is None:
        by_kind = {**program.state, **({"gradients": program.state["parameters"]} if training else {})}
        need = sum(by_kind.values())
        fits = False if need > usable else None
        return {"by_kind": by_kind, "total": need, "usable": usable, "fits": fits, "at_least": True}
    by_kind = dict(executable.memory)
    other_parameters = program.state.get("parameters", 0) - by_kind["parameters"]
    if not training and other_parameters > 0:  # the encoder of the other side is in memory, but is not an argument
        by_kind["other parameters"] = other_parameters
    need = sum(by_kind.values())
    return {"by_kind": by_kind, "total": need, "usable": usable, "fits": need <= usable, "at_least": False}


def compiled_values(executable: CompiledProgram) -> PlanValues:
    """Return the collectives of a compiled program, those with most bytes first, and its sums, for the JSON of `jaxret
    plan`."""
    return {
        "collectives": [asdict(entry) for entry in sorted(executable.collectives, key=lambda c: -c.times * c.bytes)],
        "collective_bytes": executable.bytes_moved,
        "sent_bytes": executable.bytes_sent,
        "overlapped": executable.overlap,
        "device_flops": executable.flops,
        "warnings": list(executable.warnings),
    }


def plan_training(
    config: ConfigDict,
    directory: Path,
    shapes: programs.Shapes,
    topology: Topology | None,
    executable: CompiledProgram | None = None,
) -> PlanValues:
    """Estimate the needs of a training step.

    Args:
        directory: folder of the encoder.
        shapes: shapes of the largest batch.
        topology: chips; None: a plan without chips.
        executable: the step's program, compiled for these chips.
    """
    devices = jax.devices()[: topology.devices if topology else max(config.mesh.fsdp, 1) * config.mesh.tensor]
    program = programs.training_program(config, directory, shapes, devices)
    retriever = with_adapters(programs.retriever_of(config, directory), config.lora)
    kinds = [*program_work(program), optimizer_work(config, retriever)]
    values: PlanValues = {
        "parameters": parameter_counts(retriever),
        "batch": asdict(shapes),
        "flops": kinds,
        "flops_total": total_flops(kinds),
    }
    if topology:
        values["memory"] = device_memory(program, topology, executable, training=True)
        traffic = 2.0 * sum(program.state.values())  # parameters and moments are read and written
        # Teacher and frozen parameters are only read.
        traffic -= program.state.get("teacher", 0) + program.state.get("frozen parameters", 0)
        values["lower_bound"] = lower_bound(kinds, topology, traffic, executable)
    if executable:
        values |= compiled_values(executable)
    leaves = jax.tree.leaves(checkpoint_trees(program.arguments[0], make_update_rule(config)))
    values["checkpoint_bytes"] = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return values


def plan_encoding(
    config: ConfigDict,
    directory: Path,
    passages: int,
    topology: Topology | None,
    executable: CompiledProgram | None = None,
) -> PlanValues:
    """Estimate the needs of encoding a corpus whose passages have the largest length.

    Args:
        directory: folder of the encoder.
        passages: number of passages.
        topology: chips; None: a plan without chips.
        executable: the program of a batch, compiled for these chips.
    """
    devices = jax.devices()[: topology.devices if topology else 1]
    program = programs.encoding_program(config, directory, devices)
    retriever = programs.retriever_of(config, directory)
    kinds = program_work(program)
    rows, length = program.arguments[1].ids.shape
    values: PlanValues = {
        "parameters": parameter_counts(retriever),
        "batch": {"passages": rows, "passage_length": length},
        "flops": kinds,
        "flops_total": total_flops(kinds),
        "passages": passages,
        "corpus_bytes": corpus_bytes(config, retriever, passages),
    }
    if topology:
        values["memory"] = device_memory(program, topology, executable, training=False)
        # Only the encoder of passages is read.
        traffic = program.state["parameters"] / (2 if not config.encoder.tied else 1)
        values["lower_bound"] = lower_bound(kinds, topology, traffic, executable)
        values["corpus_seconds"] = values["lower_bound"]["seconds"] * math.ceil(passages / rows)
    if executable:
        values |= compiled_values(executable)
    return values


def corpus_bytes(config: ConfigDict, retriever: RetrieverModel, passages: int) -> int:
    """Return the bytes of the vectors on disk, without ids, for passages of the largest length. Raises ValueError for
    an unknown encode.dtype."""
    if config.encode.dtype not in VECTOR_DTYPES:
        raise ValueError(f"encode.dtype is {config.encode.dtype!r}; it must be one of {', '.join(VECTOR_DTYPES)}")
    vectors = retriever.most_vectors(config.tokens.passage_length)
    return passages * vectors * retriever.dimension * np.dtype(config.encode.dtype).itemsize


def plan_searching(
    config: ConfigDict,
    directory: Path,
    search: SearchLoad,
    topology: Topology | None,
    executable: CompiledProgram | None = None,
) -> PlanValues:
    """Estimate the needs of an exact search of an encoded corpus by XLA, a thousand queries at a time.

    Vectors stay on the devices, or are streamed in blocks if they do not fit. Lists of vectors are searched block by
    block on one device. Each of several hosts searches its part of the passages, and the results are merged.

    Args:
        directory: folder of the encoder.
        search: passages, queries, k and precision.
        topology: chips; None: a plan without chips.
        executable: the program of a block, compiled for these chips.
    """
    retriever = programs.retriever_of(config, directory)
    total_load, search, hosts = search, search.on(retriever, topology), topology.hosts if topology else 1
    topology = topology and topology.of_host
    devices, platform = (topology.devices, topology.chip.platform) if topology else (1, "cpu")
    program = programs.search_program(config, directory, search, jax.devices()[:devices], platform)
    kinds = program_work(program)
    lists = retriever.vectors_per_passage is None
    query_vectors = jax.tree.leaves(program.arguments)[0].shape[0]
    queries = query_vectors // (config.tokens.query_length if retriever.late_interaction else 1)
    pieces = math.ceil(search.passages / search.block_passages)
    if lists:
        pieces = math.ceil(search.passages * retriever.most_vectors(config.tokens.passage_length) / BLOCK_ROWS)
    runs = pieces * math.ceil(search.queries / queries)
    values: PlanValues = {
        "batch": {"queries": queries, "passages": search.block_passages, "k": search.k, "precision": search.precision},
        "flops": kinds,
        "flops_total": total_flops(kinds) * runs * hosts,
        "passages": total_load.passages,
        "queries": search.queries,
        "pieces": pieces,
        "corpus_bytes": corpus_bytes(config, retriever, total_load.passages),
    }
    if hosts > 1:
        vector_count = search.queries * (config.tokens.query_length if retriever.late_interaction else 1)
        values["host"] = host_needs(search, hosts, vector_count * retriever.dimension * 4)
        values["host"]["vector_bytes"] = corpus_bytes(config, retriever, search.passages)
    if topology:
        traffic = programs.bytes_on_device(program.arguments[2]) if lists else program.state["documents"]
        chips = Topology(topology.chip, (1,)) if lists else topology
        values["memory"] = device_memory(program, chips, executable, training=False)
        values["lower_bound"] = lower_bound(kinds, chips, traffic, executable)
        values["search_seconds"] = values["lower_bound"]["seconds"] * runs
        if hosts > 1:  # the rate of links is an upper bound of the rate of the network between hosts
            values["host"]["merge_seconds"] = values["host"]["received_bytes"] / topology.chip.link
            values["search_seconds"] += values["host"]["merge_seconds"]
    if executable:
        values |= compiled_values(executable)
        if not lists:
            values["traffic"] = {"bytes": executable.traffic, "products": product_bytes(program, devices)}
    return values


def host_needs(search: SearchLoad, hosts: int, query_bytes: int) -> PlanValues:
    """Estimate the memory of one of several hosts, without the vectors of its passages, and the bytes that it receives.

    Args:
        search: load of one host.
        hosts: number of hosts.
        query_bytes: bytes of the vectors of all queries.
    """
    hits = search.queries * min(search.k, search.passages)
    precision = find_precision(search.precision)
    candidates = min(search.queries * first_depth(search.k, precision.extra_candidates, MARGIN), PASS_CANDIDATES)
    return {
        "hosts": hosts,
        "passages": search.passages,
        "memory": query_bytes + HIT_BYTES * (candidates + 2 * hits),  # hits among its own passages, and among all
        "received_bytes": query_bytes + HIT_BYTES * hits * hosts,
    }


def product_bytes(program: programs.AbstractProgram, devices: int) -> int:
    """Return the bytes that one device moves for a plain product of queries with all vectors: operands and float32
    scores."""
    queries, vectors = (x.numbers for x in program.arguments[:2])
    scores = 4 * queries.shape[0] * math.prod(vectors.shape[:-1])
    return programs.bytes_on_device(queries) + (vectors.size * vectors.dtype.itemsize + scores) // devices
