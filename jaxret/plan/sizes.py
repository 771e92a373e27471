"""What corpora need, family by family: bytes on disk, bytes on devices, the least time of a search. Arithmetic alone:
nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxret.chips import GIB, Topology
from jaxret.plan.plan import arithmetic
from jaxret.plan.programs import QUERY_ROWS, encoder_directory, retriever_of
from jaxret.plan.shipped import for_accelerators
from jaxret.retrieval.pieces import row_bytes
from jaxret.retrieval.precision import PRECISIONS

PASSAGES = (1_000_000, 8_841_823, 100_000_000)
LENGTH = 80  # tokens of a passage, where each is a vector: about MS MARCO's
SEARCHED = ("float32", "bfloat16", "int8")
RATES = {"float32": "float32 exact"}  # precision of candidates -> of chips.PRECISIONS


def markdown(folder: Path, topology: Topology) -> Iterator[str]:
    """A row for each family and number of passages. Time is that of QUERY_ROWS queries on all chips of the topology."""
    named = [f"{name}, {topology}" for name in SEARCHED]
    yield " | ".join(["| family (vectors x numbers)", "passages", "float32 on disk", "float16", *named]) + " |"
    yield "|:--|--:|--:|--:|" + "--:|" * len(named)
    for name, vectors, dimension, of_query in families(folder):
        cell = _cell if of_query == 1 else partial(_list_cell, of_query)
        for passages in PASSAGES:
            disk = [f"{passages * vectors * dimension * each / GIB:,.1f} GiB" for each in (4, 2)]
            cells = [cell(passages, vectors, dimension, each, topology) for each in SEARCHED]
            yield " | ".join([f"| {name} ({vectors} x {dimension})", f"{passages:,}", *disk, *cells]) + " |"


def families(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    """(name, vectors of a passage, numbers of each, vectors of a query) of the configs of a folder, without its
    recipes; those of one head whose vectors are alike count once."""
    seen = set()
    for name, config in for_accelerators(folder):
        retriever = retriever_of(config, encoder_directory(config.encoder.checkpoint)[0])
        found = retriever.most_vectors(LENGTH), retriever.dimension
        if not name.startswith("recipes/") and (config.head.name, *found) not in seen:
            seen.add((config.head.name, *found))
            yield name, *found, config.tokens.query_length if retriever.late_interaction else 1


def _cell(passages: int, vectors: int, dimension: int, precision: str, topology: Topology) -> str:
    """Memory of each device, if the corpus lies on all of them; and the products' time at the full rate."""
    each = math.ceil(passages / topology.devices) * row_bytes((vectors, dimension), PRECISIONS[precision])
    flops = 2 * QUERY_ROWS * passages * vectors * dimension
    seconds = max(_products(flops, precision, topology), each / topology.chip.bandwidth)
    fits = "" if each <= topology.chip.memory else ", in pieces"
    return f"{each / GIB:,.1f} GiB{fits}, {seconds * 1e3:,.0f} ms"


def _list_cell(of_query: int, passages: int, vectors: int, dimension: int, precision: str, topology: Topology) -> str:
    """Of lists of vectors, a block at a time, on one device: the time of the products alone."""
    flops = 2 * QUERY_ROWS * of_query * passages * vectors * dimension
    return f"a block, {_products(flops, precision, topology) * topology.devices:,.1f} s"


def _products(flops: int, precision: str, topology: Topology) -> float:
    """Seconds on all chips."""
    return arithmetic([{"part": "loss", "precision": RATES.get(precision, precision), "flops": flops}], topology)
