"""What corpora need, family by family: bytes on disk, bytes on devices, the least time of a search. Arithmetic alone:
nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    for name, vectors, dimension in families(folder):
        for passages in PASSAGES:
            disk = [f"{passages * vectors * dimension * each / GIB:,.1f} GiB" for each in (4, 2)]
            # Lists of vectors are searched a block at a time, on one device.
            known = vectors != LENGTH
            cells = [_cell(passages, vectors, dimension, each, topology) if known else "–" for each in SEARCHED]
            yield " | ".join([f"| {name} ({vectors} x {dimension})", f"{passages:,}", *disk, *cells]) + " |"


def families(folder: Path) -> Iterator[tuple[str, int, int]]:
    """(name, vectors of a passage, numbers of each) of the configs of a folder, without its recipes; those of one head
    whose vectors are alike count once."""
    seen = set()
    for name, config in for_accelerators(folder):
        retriever = retriever_of(config, encoder_directory(config.encoder.checkpoint)[0])
        found = retriever.most_vectors(LENGTH), retriever.dimension
        if not name.startswith("recipes/") and (config.head.name, *found) not in seen:
            seen.add((config.head.name, *found))
            yield name, *found


def _cell(passages: int, vectors: int, dimension: int, precision: str, topology: Topology) -> str:
    """Memory of each device, if the corpus lies on all of them; and the products' time at the full rate."""
    each = math.ceil(passages / topology.devices) * row_bytes((vectors, dimension), PRECISIONS[precision])
    flops = 2 * QUERY_ROWS * passages * vectors * dimension
    kind = {"part": "loss", "precision": RATES.get(precision, precision), "flops": flops}
    seconds = max(arithmetic([kind], topology), each / topology.chip.bandwidth)
    fits = "" if each <= topology.chip.memory else ", in pieces"
    return f"{each / GIB:,.1f} GiB{fits}, {seconds * 1e3:,.0f} ms"
