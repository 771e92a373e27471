"""A corpus of single vectors in blocks as large as the devices hold; the next block is loaded while one is searched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jaxret.search.backends.accelerators import plan_cells, platform_of
from jaxret.search.backends.precision import FLOAT32, Precision
from jaxret.search.backends.select import Backend
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.in_memory import InMemoryCorpus, LoadedBlock, require_finite_vectors
from jaxret.search.rounding import upper_norms

HOST_BYTES = 2**28  # of a block, where the devices' memory is the host's
FEWEST = 64  # rows of a block
AT_A_TIME = 3  # blocks that are on the devices at worst: one that is searched, the last one, the next one

T = TypeVar("T")


def row_bytes(shape: tuple[int, ...], precision: Precision) -> int:
    """Return the bytes of a row of `shape` [V,D] on the devices: its numbers, and below float32 a scale, a norm and an
    error."""
    width, dimension = shape
    return width * (dimension * np.dtype(precision.dtype).itemsize + (12 if precision != FLOAT32 else 0))


def rows_at_once(total: int, shape: tuple[int, ...], precision: Precision, free: int | None) -> int:
    """Return how many rows are on the devices at a time.

    Args:
        total: rows of the corpus.
        shape: [V,D] of a row.
        precision: of the numbers.
        free: bytes left on devices with a memory of their own; None: they share the host's.

    Raises ValueError where these are so few that a search would take days.
    """
    each = row_bytes(shape, precision)
    if free is not None:
        each = each * 17 // 16  # `rounded_size` leaves places empty
        if total * each <= free:
            return total
    room = HOST_BYTES if free is None else free // AT_A_TIME
    if room // each < min(total, FEWEST):
        raise ValueError(
            f"the devices have {free or 0:,} bytes left for vectors of {each:,} bytes: end other programs on them, or "
            "search with backend=faiss-cpu"
        )
    return math.ceil(total / math.ceil(total / (room // each)))  # all alike: one program


def fits_devices(corpus: Any, backend: Backend) -> bool:
    """Return whether a backend holds a whole corpus on devices that have a memory of their own."""
    return _share_of_devices(corpus, backend) == 1


def exceeds_devices(corpus: Any, backend: Backend) -> bool:
    """Return whether a corpus is larger than the memory of such devices: blocks take turns, and none stays there."""
    return 0 < _share_of_devices(corpus, backend) < 1


def _share_of_devices(corpus: Any, backend: Backend) -> float:
    """Return the share of a corpus that fits on devices that have a memory of their own; 0 where none has."""
    if corpus.ragged or not isinstance(backend, Xla) or (free := backend.free) is None:
        return 0.0
    _, shard = next(iter(corpus))
    return rows_at_once(corpus.total_rows, shard.shape[1:], backend.precision, free) / corpus.total_rows


def stream_blocks(corpus: Any, backend: Xla) -> Iterator[LoadedBlock]:
    """Yield the rows of a corpus as blocks on the devices of a backend: one block if they fit. Raises ValueError for a
    vector that is not finite, naming its row."""
    total, shards = corpus.total_rows, list(corpus)
    shape = shards[0][1].shape[1:]
    free = backend.free
    if free is None and isinstance(corpus, InMemoryCorpus):
        at_once = total  # all of it stays in the host's memory, in however many blocks
    else:
        at_once = rows_at_once(total, shape, backend.precision, free)
    layout = plan_cells(at_once, shape, backend.precision, backend.mesh.size, platform_of(backend.mesh))
    step = layout.chunk(shape[1]) * layout.cells

    def made() -> Iterator[LoadedBlock]:
        for first in range(0, total, at_once):
            stop = min(first + at_once, total)
            largest = 0.0

            def checked(first: int = first, stop: int = stop) -> Iterator[np.ndarray]:
                nonlocal largest
                for start in range(first, stop, step):
                    chunk = read_rows(shards, start, min(start + step, stop))
                    norms = upper_norms(chunk.reshape(-1, shape[1])).reshape(-1, shape[0]).max(axis=1)  # a NaN wins
                    require_finite_vectors(corpus, np.arange(start, start + len(chunk)), norms)
                    largest = max(largest, float(norms.max()))
                    yield chunk

            top = backend.hold(checked(), layout)
            yield LoadedBlock(np.arange(first, stop), top, largest)

    return ahead(made())


def read_rows(shards: list[tuple[int, Any]], start: int, stop: int) -> np.ndarray:
    """Return rows [start, stop) of (first row, vectors) shards, float32 [rows,V,D]."""
    blocks = []
    for first, shard in shards:
        begin, end = max(start - first, 0), min(stop - first, len(shard))
        if begin < end:
            blocks.append(np.asarray(shard[begin:end], np.float32))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items; a thread makes the next one while one is used."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item
