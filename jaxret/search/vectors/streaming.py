"""Stream a corpus of stacked vectors to the devices in blocks; the next block is loaded while one is searched."""

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
from jaxret.search.rounding import upper_norms
from jaxret.search.vectors.in_memory import InMemoryCorpus, LoadedBlock, require_finite_vectors

HOST_BYTES = 2**28  # size of a block if the devices share the host's memory
FEWEST_ROWS = 64  # least number of rows of a block
BLOCKS_AT_ONCE = 3  # most blocks on the devices at a time: the previous one, the current one and the next one

T = TypeVar("T")


def row_bytes(shape: tuple[int, ...], precision: Precision) -> int:
    """Return the bytes of a row of shape [V,D] on the devices; below float32 with scale, norm and error of a vector."""
    width, dimension = shape
    return width * (dimension * np.dtype(precision.dtype).itemsize + (12 if precision != FLOAT32 else 0))


def rows_at_once(total: int, shape: tuple[int, ...], precision: Precision, free: int | None) -> int:
    """Return the number of rows of a block: the whole corpus if it fits on the devices.

    Args:
        total: rows of the corpus.
        shape: shape [V,D] of a row.
        precision: precision of the vectors on the devices.
        free: free bytes on the devices; None if they share the host's memory.

    Raises ValueError if the memory is too small: a search would take days.
    """
    size = row_bytes(shape, precision)
    if free is not None:
        size = size * 17 // 16  # `rounded_size` adds up to a sixteenth of empty positions
        if total * size <= free:
            return total
    room = HOST_BYTES if free is None else free // BLOCKS_AT_ONCE
    if room // size < min(total, FEWEST_ROWS):
        raise ValueError(
            f"the devices have only {free or 0:,} free bytes for vectors of {size:,} bytes each: end other programs "
            "on them, or search with backend=faiss-cpu"
        )
    return math.ceil(total / math.ceil(total / (room // size)))  # blocks of equal size need only one program


def fits_devices(corpus: Any, backend: Backend) -> bool:
    """Return whether a whole corpus fits on the backend's devices, which have their own memory."""
    return _share_of_devices(corpus, backend) == 1


def exceeds_devices(corpus: Any, backend: Backend) -> bool:
    """Return whether a corpus is too large for the backend's devices, which have their own memory, so that no block
    stays there."""
    return 0 < _share_of_devices(corpus, backend) < 1


def _share_of_devices(corpus: Any, backend: Backend) -> float:
    """Return the share of a corpus that fits on the backend's devices; 0 if these have no separate memory."""
    if corpus.ragged or not isinstance(backend, Xla) or (free := backend.free) is None:
        return 0.0
    _, shard = next(iter(corpus))
    return rows_at_once(corpus.total_rows, shard.shape[1:], backend.precision, free) / corpus.total_rows


def stream_blocks(corpus: Any, backend: Xla) -> Iterator[LoadedBlock]:
    """Yield the rows of a corpus in blocks on the devices of a backend, in one block if they fit.

    Raises ValueError for a vector that is not finite, with its row.
    """
    total, shards = corpus.total_rows, list(corpus)
    shape = shards[0][1].shape[1:]
    free = backend.free
    if free is None and isinstance(corpus, InMemoryCorpus):
        block_rows = total  # the corpus is in the host's memory anyway, so blocks would save nothing
    else:
        block_rows = rows_at_once(total, shape, backend.precision, free)
    layout = plan_cells(block_rows, shape, backend.precision, backend.mesh.size, platform_of(backend.mesh))
    step = layout.chunk(shape[1]) * layout.cells

    def load_blocks() -> Iterator[LoadedBlock]:
        for first in range(0, total, block_rows):
            stop = min(first + block_rows, total)
            largest = 0.0

            def check_chunks(first: int = first, stop: int = stop) -> Iterator[np.ndarray]:
                nonlocal largest
                for start in range(first, stop, step):
                    chunk = read_rows(shards, start, min(start + step, stop))
                    # NaN if one of them is NaN.
                    norms = upper_norms(chunk.reshape(-1, shape[1])).reshape(-1, shape[0]).max(axis=1)
                    require_finite_vectors(corpus, np.arange(start, start + len(chunk)), norms)
                    largest = max(largest, float(norms.max()))
                    yield chunk

            top = backend.hold(check_chunks(), layout)
            yield LoadedBlock(np.arange(first, stop), top, largest)

    return prefetch(load_blocks())


def read_rows(shards: list[tuple[int, Any]], start: int, stop: int) -> np.ndarray:
    """Return rows `start` to `stop` (excluded) of shards, pairs (first row, vectors), as float32 [rows,V,D]."""
    blocks = []
    for first, shard in shards:
        begin, end = max(start - first, 0), min(stop - first, len(shard))
        if begin < end:
            blocks.append(np.asarray(shard[begin:end], np.float32))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator; a thread computes the next item while the current one is used."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item
