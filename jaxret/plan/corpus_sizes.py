"""The needs of corpora by family: bytes on disk and on devices, and a lower bound of the time of a search.

Nothing is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxret.parallel.chips import GIB, Topology
from jaxret.plan.config_folder import for_accelerators
from jaxret.plan.estimates import arithmetic
from jaxret.plan.programs import QUERY_ROWS, encoder_directory, retriever_of
from jaxret.search.backends.precision import PRECISIONS
from jaxret.search.streaming import row_bytes

CORPUS_SIZES = (1_000_000, 8_841_823, 100_000_000)
LENGTH = 80  # tokens of a passage, about the mean of MS MARCO, for families with a vector for each token
SEARCH_PRECISIONS = ("float32", "bfloat16", "int8")
CHIP_PRECISIONS = {"float32": "float32 exact"}  # precision of candidates -> precision of chips.PRODUCT_PRECISIONS


def corpus_size_table(folder: Path, topology: Topology) -> Iterator[str]:
    """Yield the lines of a table with a row for each family and number of passages.

    Times are for QUERY_ROWS queries on all chips of the topology.
    """
    headers = [f"{name}, {topology}" for name in SEARCH_PRECISIONS]
    yield " | ".join(["| family (vectors x dimensions)", "passages", "float32 on disk", "float16", *headers]) + " |"
    yield "|:--|--:|--:|--:|" + "--:|" * len(headers)
    for name, vectors, dimension, query_vectors in config_families(folder):
        cell = _cell if query_vectors == 1 else partial(_list_cell, query_vectors)
        for passages in CORPUS_SIZES:
            disk = [f"{passages * vectors * dimension * size / GIB:,.1f} GiB" for size in (4, 2)]
            cells = [cell(passages, vectors, dimension, precision, topology) for precision in SEARCH_PRECISIONS]
            yield " | ".join([f"| {name} ({vectors} x {dimension})", f"{passages:,}", *disk, *cells]) + " |"


def config_families(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, vectors of a passage, size of a vector, vectors of a query) for the configs of a folder.

    Recipes are left out. Configs of one head with equal numbers count once.
    """
    distinct = set()
    for name, config in for_accelerators(folder):
        retriever = retriever_of(config, encoder_directory(config.encoder.checkpoint)[0])
        numbers = retriever.most_vectors(LENGTH), retriever.dimension
        if not name.startswith("recipes/") and (config.head.name, *numbers) not in distinct:
            distinct.add((config.head.name, *numbers))
            yield name, *numbers, config.tokens.query_length if retriever.late_interaction else 1


def _cell(passages: int, vectors: int, dimension: int, precision: str, topology: Topology) -> str:
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
