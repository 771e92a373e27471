"""Search over the processes of a JAX job: each holds a range of the corpus's shards, and the best of all are merged.

Process 0 encodes the queries and sends the vectors to the others, so that all score the same bits. Each process finds
the k best passages of its own range and proves them (`proof.py`). A passage of the corpus's best k is among the best k
of its range, as no more passages stand before it there; so the best k of all ranges' best, by score and then by row,
are those of the corpus, and the proofs of the ranges are the proof of the whole.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxret.parallel.processes import agreed_texts, agreement, require_platform
from jaxret.search.exact import sorted_by_rule
from jaxret.search.proof import SearchResult
from jaxret.types import Ragged, SparseRows, TextVectors, word_dtype

HIT_BYTES = 12  # of a passage of a ranking: its score, and its row
WORDS = 2**22  # of four bytes that a process sends at a time: 16 MiB

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those that search together: all call the same methods in the same order. One process alone
    exchanges nothing."""

    number: int = 0
    count: int = 1

    @classmethod
    def of_job(cls) -> ProcessGroup:
        return cls(jax.process_index(), jax.process_count())

    @property
    def leads(self) -> bool:
        """Return whether this is the process that names passages, prints and writes."""
        return self.number == 0

    def agreed(self, make: Callable[[], T]) -> T:
        """Return what `make` returns; in every process raise the error of any (`processes.agreement`)."""
        with agreement() if self.count > 1 else nullcontext():
            return make()

    def require_same(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError in every process if one has other settings, JSON values, than process 0."""
        if self.count == 1:
            return
        first, *others = map(json.loads, agreed_texts(json.dumps(settings)))
        for number, other in enumerate(others, 1):
            if other != first:
                raise ValueError(_describe_difference(number, first, other))

    def vectors_of_first(self, make: Callable[[], TextVectors], sparse: bool, dimension: int) -> TextVectors:
        """Return the vectors that `make` returns in process 0; it is not called in others.

        sparse, dimension: of the vectors.
        """
        if self.count == 1:
            return make()
        vectors = self.agreed(lambda: make() if self.leads else None)
        offsets = _of_first(None if vectors is None else vectors.offsets, np.int64)
        if sparse:
            words = _of_first(vectors.words if isinstance(vectors, SparseRows) else None, word_dtype(dimension))
            weights = _of_first(vectors.weights if isinstance(vectors, SparseRows) else None, np.float32)
            return SparseRows(words, weights, offsets, dimension)
        flat = _of_first(vectors.flat if isinstance(vectors, Ragged) else None, np.float32)
        return Ragged(flat.reshape(-1, dimension), offsets)

    def merged(self, result: SearchResult, first_row: int, width: int) -> SearchResult:
        """Return the best passages of all ranges, the same in every process.

        Args:
            result: the best passages of this process's range.
            first_row: number of rows in the ranges before it.
            width: passages to return for each query, of k and all passages the lower number.
        """
        if self.count == 1:
            return result
        queries, own_width = result.scores.shape
        scores = np.full((queries, width), -np.inf, np.float32)
        rows = np.full((queries, width), -1, np.int64)
        scores[:, :own_width], rows[:, :own_width] = result.scores, result.rows + first_row
        for start in range(0, queries, step := max(1, 4 * WORDS // (HIT_BYTES * width))):
            part = slice(start, start + step)
            every = process_allgather((scores[part], rows[part].view(np.uint32)))  # [processes, queries, width or more]
            every_score, every_row = (np.concatenate(list(each), axis=1) for each in every)
            ranked = sorted_by_rule(every_score, every_row.view(np.int64))
            scores[part], rows[part] = ranked[0][:, :width], ranked[1][:, :width]
        deeper = result.rounds[1] if len(result.rounds) > 1 else 0
        work = process_allgather(np.array([result.scored, deeper]).view(np.uint32)).view(np.int64)
        rounds = (queries, int(work[:, 1].max())) if work[:, 1].any() else (queries,)
        backend = f"{result.backend}, in each of {self.count} processes"
        return SearchResult(scores, rows, backend, rounds, int(work[:, 0].sum()))


@contextmanager
def searching(together: bool, platform: str, flags: Mapping[str, str]) -> Iterator[None]:
    """Search in this process, or with `together` in every process of a job, the first of which alone prints: they raise
    the error of any, and ValueError if one lacks the platform or has other flags."""
    with agreement() if together else nullcontext():
        require_platform(platform, "--platform")
        group = ProcessGroup.of_job() if together else ProcessGroup()
        group.require_same(flags)
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if group.leads else nowhere):
            yield


def _describe_difference(number: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a sentence on a process whose settings are not those of process 0."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    values = [f"{name} is {other.get(name)!r} there and {first.get(name)!r} in process 0" for name in names]
    return f"process {number} searches otherwise: {', '.join(values)}; start the same command in all, on the same files"


def _of_first(array: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Return the numbers of process 0 in every process, bit by bit; `array` is None in others."""
    data = np.empty(0, np.uint8) if array is None else np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
    size = int(broadcast_one_to_all(np.array(len(data) // np.dtype(dtype).itemsize)))
    received = np.zeros(-(-size * np.dtype(dtype).itemsize // 4), np.uint32)
    received.view(np.uint8)[: len(data)] = data
    for start in range(0, len(received), WORDS):
        part = received[start : start + WORDS]
        part[:] = broadcast_one_to_all(part)
    return received.view(dtype)[:size]
