"""A corpus of single vectors in pieces as large as the devices hold, the next one on its way while one is searched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jaxret.retrieval.backends import Backend, Xla
from jaxret.retrieval.devices import lay_out, platform_of
from jaxret.retrieval.kept import Block, Kept, require_finite
from jaxret.retrieval.precision import FLOAT32, Precision
from jaxret.retrieval.rounding import upper_norms

HOST_BYTES = 2**28  # of a piece, where the devices' memory is the host's
FEWEST = 64  # rows of a piece
AT_A_TIME = 3  # pieces that are on the devices at worst: one that is searched, the last one, the next one

T = TypeVar("T")


def row_bytes(shape: tuple[int, ...], precision: Precision) -> int:
    """Of a row of `shape` [V,D] on the devices: its numbers, and below float32 a scale, a norm and an error."""
    width, dimension = shape
    return width * (dimension * np.dtype(precision.dtype).itemsize + (12 if precision != FLOAT32 else 0))


def rows_at_once(total: int, shape: tuple[int, ...], precision: Precision, free: int | None) -> int:
    """How many rows of `shape` [V,D] are on the devices at a time, of `total`. free: bytes of a memory of their own.
    Raises ValueError where these are so few that a search would take days."""
    each = row_bytes(shape, precision)
    if free is not None:
        each = each * 17 // 16  # `few_sizes` leaves places empty
        if total * each <= free:
            return total
    room = HOST_BYTES if free is None else free // AT_A_TIME
    if room // each < min(total, FEWEST):
        raise ValueError(
            f"the devices have {free or 0:,} bytes left for vectors of {each:,} bytes: end what else runs there, or "
            "search with --backend=faiss-cpu"
        )
    return math.ceil(total / math.ceil(total / (room // each)))  # all alike: one program


def on_devices(corpus: Any, backend: Backend) -> bool:
    """Whether a backend holds a whole corpus on devices that have a memory of their own."""
    return _share_of_devices(corpus, backend) == 1


def in_turns(corpus: Any, backend: Backend) -> bool:
    """Whether a backend holds some of a corpus at a time on such devices, so that nothing stays there."""
    return 0 < _share_of_devices(corpus, backend) < 1


def _share_of_devices(corpus: Any, backend: Backend) -> float:
    """How much of a corpus is at once on devices that have a memory of their own; 0 where none has."""
    if corpus.ragged or not isinstance(backend, Xla) or (free := backend.free) is None:
        return 0.0
    _, shard = next(iter(corpus))
    return rows_at_once(corpus.total_rows, shard.shape[1:], backend.precision, free) / corpus.total_rows


def pieces(corpus: Any, backend: Xla) -> Iterator[Block]:
    """The rows of a `search.Corpus` on the devices of a backend: all at once if they fit there. Raises ValueError for a
    vector that is not finite, naming its row."""
    total, shards = corpus.total_rows, list(corpus)
    shape = shards[0][1].shape[1:]
    free = backend.free
    if free is None and isinstance(corpus, Kept):
        at_once = total  # all of it stays in the host's memory, in however many pieces
    else:
        at_once = rows_at_once(total, shape, backend.precision, free)
    layout = lay_out(at_once, shape, backend.precision, backend.mesh.size, platform_of(backend.mesh))
    step = layout.chunk(shape[1]) * layout.cells

    def made() -> Iterator[Block]:
        for first in range(0, total, at_once):
            stop = min(first + at_once, total)
            largest = 0.0

            def checked(first: int = first, stop: int = stop) -> Iterator[np.ndarray]:
                nonlocal largest
                for start in range(first, stop, step):
                    chunk = read_rows(shards, start, min(start + step, stop))
                    norms = upper_norms(chunk.reshape(-1, shape[1])).reshape(-1, shape[0]).max(axis=1)  # a NaN wins
                    require_finite(corpus, np.arange(start, start + len(chunk)), norms)
                    largest = max(largest, float(norms.max()))
                    yield chunk

            top = backend.hold(checked(), layout)
            yield Block(np.arange(first, stop), top, largest)

    return ahead(made())


def read_rows(shards: list[tuple[int, Any]], start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of (first row, vectors) shards, float32 [rows,V,D]."""
    found = []
    for first, shard in shards:
        begin, end = max(start - first, 0), min(stop - first, len(shard))
        if begin < end:
            found.append(np.asarray(shard[begin:end], np.float32))
    return found[0] if len(found) == 1 else np.concatenate(found)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items; each next one is made by a thread while one is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
