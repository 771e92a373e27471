"""A plan: what a config asks of chips that nobody has started yet, as values that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxret import flops as counting
from jaxret.chips import Topology
from jaxret.models.retriever import BiEncoder
from jaxret.plan import programs
from jaxret.plan.compiled import Compiled
from jaxret.plan.programs import Asked
from jaxret.retrieval.dense import BLOCK_ROWS
from jaxret.training.optimizers import make_optimizer
from jaxret.types import VECTOR_DTYPES

Values = dict[str, Any]


def size(tree: Any) -> int:
    """How many numbers a tree of (abstract) arrays has."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def parameters(retriever: BiEncoder) -> Values:
    """Numbers by part, and in all."""
    params = jax.eval_shape(retriever.init, jax.random.key(0))
    return {**{name: size(part) for name, part in params.items()}, "total": size(params)}


def work(planned: programs.Planned) -> list[Values]:
    """FLOPs of one run of a program on all devices together: by part, phase and precision."""
    found = counting.count(planned.program.trace(*planned.arguments))
    order = {name: place for place, name in enumerate((*counting.PARTS, *counting.PHASES))}
    kinds = sorted(found, key=lambda kind: (order[kind.part], order[kind.phase], kind.precision))
    return [{**kind._asdict(), "flops": found[kind]} for kind in kinds]


def optimizer_work(config: ConfigDict, retriever: BiEncoder) -> Values:
    """The optimizer's operations in a step, one for each number that it computes."""
    optimizer, _ = make_optimizer(config.optimizer, 1000)
    params = jax.eval_shape(retriever.init, jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)
    operations = counting.elementwise(optimizer.update, params, state, params)
    return {"part": "optimizer", "phase": "forward", "precision": "float32", "flops": operations}


def products(kinds: list[Values]) -> list[Values]:
    """Those that are not the optimizer's, whose operations are on single numbers: its time is that of memory."""
    return [kind for kind in kinds if kind["part"] != "optimizer"]


def total(kinds: list[Values]) -> int:
    return sum(kind["flops"] for kind in products(kinds))


def arithmetic(kinds: list[Values], topology: Topology) -> float:
    """Seconds that the products take at the chips' full rates."""
    rates = topology.chip.rates
    return sum((kind["flops"] / rates[kind["precision"]] for kind in products(kinds)), 0.0) / topology.devices


def lower_bound(kinds: list[Values], topology: Topology, traffic: int | float, compiled: Compiled | None) -> Values:
    """Seconds that a run of the program takes at least: what is slowest of arithmetic, memory (`traffic`: bytes that a
    device reads and writes at least) and links, each at its full rate."""
    chip = topology.chip
    parts = {"arithmetic": arithmetic(kinds, topology), "memory": traffic / chip.bandwidth}
    if compiled is not None:
        parts["links"] = compiled.sent / chip.link
    return {**parts, "seconds": max(parts.values())}


def memory(planned: programs.Planned, topology: Topology, compiled: Compiled | None, training: bool) -> Values:
    """Bytes of a device. Without the compiler only what is known to be there; `fits` is None if that says nothing."""
    usable = topology.chip.memory
    if compiled is None:
        known = {**planned.state, **({"gradients": planned.state["parameters"]} if training else {})}
        need = sum(known.values())
        fits = False if need > usable else None
        return {"by_kind": known, "total": need, "usable": usable, "fits": fits, "at_least": True}
    by_kind = dict(compiled.memory)
    unused = planned.state.get("parameters", 0) - by_kind["parameters"]
    if not training and unused > 0:  # the other side's encoder, which the program does not read
        by_kind["other parameters"] = unused
    need = sum(by_kind.values())
    return {"by_kind": by_kind, "total": need, "usable": usable, "fits": need <= usable, "at_least": False}


def compiled_values(compiled: Compiled) -> Values:
    """What JSON holds of a compiled program."""
    return {
        "collectives": [asdict(c) for c in sorted(compiled.collectives, key=lambda c: -c.times * c.bytes)],
        "collective_bytes": compiled.moved,
        "sent_bytes": compiled.sent,
        "device_flops": compiled.flops,
        "warnings": list(compiled.warnings),
    }


def plan_training(
    config: ConfigDict,
    directory: Path,
    shapes: programs.Shapes,
    topology: Topology | None,
    compiled: Compiled | None = None,
) -> Values:
    """A step of training; `compiled` is its program for the topology."""
    devices = jax.devices()[: topology.devices if topology else max(config.mesh.fsdp, 1)]
    planned = programs.training(config, directory, shapes, devices)
    retriever = programs.retriever_of(config, directory)
    kinds = [*work(planned), optimizer_work(config, retriever)]
    values: Values = {
        "parameters": parameters(retriever),
        "batch": asdict(shapes),
        "flops": kinds,
        "flops_total": total(kinds),
    }
    if topology:
        values["memory"] = memory(planned, topology, compiled, training=True)
        traffic = 2.0 * sum(planned.state.values())  # parameters and moments are read, and written again
        values["lower_bound"] = lower_bound(kinds, topology, traffic, compiled)
    if compiled:
        values |= compiled_values(compiled)
    state = jax.tree.leaves(planned.arguments[0])
    values["checkpoint_bytes"] = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state)
    return values


def plan_encoding(
    config: ConfigDict, directory: Path, passages: int, topology: Topology | None, compiled: Compiled | None = None
) -> Values:
    """Encoding a corpus of passages that are all as long as they may be."""
    devices = jax.devices()[: topology.devices if topology else 1]
    planned = programs.encoding(config, directory, "passage", devices)
    retriever = programs.retriever_of(config, directory)
    kinds = work(planned)
    rows, length = planned.arguments[1].ids.shape
    values: Values = {
        "parameters": parameters(retriever),
        "batch": {"passages": rows, "passage_length": length},
        "flops": kinds,
        "flops_total": total(kinds),
        "passages": passages,
        "corpus_bytes": corpus_bytes(config, retriever, passages),
    }
    if topology:
        values["memory"] = memory(planned, topology, compiled, training=False)
        traffic = planned.state["parameters"] / (2 if not config.encoder.tied else 1)  # of the passages' encoder
        values["lower_bound"] = lower_bound(kinds, topology, traffic, compiled)
        values["corpus_seconds"] = values["lower_bound"]["seconds"] * math.ceil(passages / rows)
    if compiled:
        values |= compiled_values(compiled)
    return values


def corpus_bytes(config: ConfigDict, retriever: BiEncoder, passages: int) -> int:
    """Of the vectors on disk, for passages as long as they may be; ids come on top."""
    if config.encode.dtype not in VECTOR_DTYPES:
        raise ValueError(f"encode.dtype is {config.encode.dtype!r}; it must be one of {', '.join(VECTOR_DTYPES)}")
    vectors = retriever.most_vectors(config.tokens.passage_length)
    return passages * vectors * retriever.dimension * np.dtype(config.encode.dtype).itemsize


def plan_searching(
    config: ConfigDict,
    directory: Path,
    asked: Asked,
    topology: Topology | None,
    compiled: Compiled | None = None,
) -> Values:
    """Exact search of an encoded corpus by XLA, a thousand queries at a time: of vectors that stay on the devices, or
    of what does not fit, pieces of them; of lists of vectors, block after block on one device."""
    retriever = programs.retriever_of(config, directory)
    devices, platform = (topology.devices, topology.chip.platform) if topology else (1, "cpu")
    planned = programs.searching(config, directory, asked, jax.devices()[:devices], platform)
    kinds = work(planned)
    lists = retriever.vectors_per_passage is None
    vectors_at_once = jax.tree.leaves(planned.arguments)[0].shape[0]
    some = vectors_at_once // (config.tokens.query_length if retriever.late_interaction else 1)
    vectors = retriever.most_vectors(config.tokens.passage_length)
    pieces = math.ceil(asked.passages * vectors / BLOCK_ROWS) if lists else math.ceil(asked.passages / asked.at_once)
    runs = pieces * math.ceil(asked.queries / some)
    values: Values = {
        "batch": {"queries": some, "passages": asked.at_once, "k": asked.k, "precision": asked.precision},
        "flops": kinds,
        "flops_total": total(kinds) * runs,
        "passages": asked.passages,
        "queries": asked.queries,
        "pieces": pieces,
        "corpus_bytes": corpus_bytes(config, retriever, asked.passages),
    }
    if topology:
        traffic = programs.bytes_on_device(planned.arguments[2]) if lists else planned.state["documents"]
        there = Topology(topology.chip, (1,)) if lists else topology
        values["memory"] = memory(planned, there, compiled, training=False)
        values["lower_bound"] = lower_bound(kinds, there, traffic, compiled)
        values["search_seconds"] = values["lower_bound"]["seconds"] * runs
    if compiled:
        values |= compiled_values(compiled)
        if not lists:
            values["traffic"] = {"bytes": compiled.traffic, "products": products_alone(planned, devices)}
    return values


def products_alone(planned: programs.Planned, devices: int) -> int:
    """Bytes that the products of queries with all vectors would read and write on one device: these, and float32
    scores."""
    queries, vectors = (x.numbers for x in planned.arguments[:2])
    scores = 4 * queries.shape[0] * math.prod(vectors.shape[:-1])
    return programs.bytes_on_device(queries) + (vectors.size * vectors.dtype.itemsize + scores) // devices
