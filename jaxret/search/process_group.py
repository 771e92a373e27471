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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
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
            if difference := _describe_difference("in process 0", first, other):
                raise ValueError(
                    f"process {number} searches otherwise: {difference}; start the same command in all, on the same "
                    "files"
                )

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

    def merged(self, result: SearchResult, width: int) -> SearchResult:
        """Return the best passages of all ranges, the same in every process.

        Args:
            result: the best passages of this process's range.
            width: passages to return for each query, of k and all passages the lower number.
        """
        if self.count == 1:
            return result
        queries, own_width = result.scores.shape
        scores = np.full((queries, width), -np.inf, np.float32)
        rows = np.full((queries, width), -1, np.int64)
        scores[:, :own_width], rows[:, :own_width] = result.scores, result.rows

        def gather(part: slice) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            every = process_allgather((scores[part], rows[part].view(np.uint32)))  # [processes, queries, width or more]
            return zip(every[0], (each.view(np.int64) for each in every[1]), strict=True)

        best = merge_ranges(queries, width, gather)
        work = process_allgather(np.array(_work(result)).view(np.uint32)).view(np.int64).tolist()
        return merged_result(*best, work, f"{result.backend}, in each of {self.count} processes")


@dataclass(frozen=True)
class SeparateRange(ProcessGroup):
    """A range of shards that is searched without the others: whoever has their results merges them. `settings` are
    those of the others."""

    settings: Mapping[str, Any] = field(default_factory=dict)

    def agreed(self, make: Callable[[], T]) -> T:
        return make()

    def require_same(self, settings: Mapping[str, Any]) -> None:
        if difference := _describe_difference("of the command", self.settings, settings):
            raise ValueError(f"a worker searches otherwise: {difference}; all hosts need the same files")


def merge_ranges(
    queries: int, width: int, ranges: Callable[[slice], Iterable[tuple[np.ndarray, np.ndarray]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and rows [Q,width] of the best passages of all ranges, a few queries at a time.

    ranges: returns, for a slice of the queries, their scores and rows in each range; rows count through all ranges.
    """
    scores, rows = np.empty((queries, width), np.float32), np.empty((queries, width), np.int64)
    for start in range(0, queries, step := max(1, 4 * WORDS // (HIT_BYTES * width))):
        part = slice(start, start + step)
        every_score, every_row = (np.concatenate(each, axis=1) for each in zip(*ranges(part), strict=True))
        best = sorted_by_rule(every_score, every_row)
        scores[part], rows[part] = best[0][:, :width], best[1][:, :width]
    return scores, rows


def merged_result(scores: np.ndarray, rows: np.ndarray, work: Sequence[tuple[int, int]], backend: str) -> SearchResult:
    """Return the result of all ranges.

    Args:
        scores, rows: of the best passages (`merge_ranges`).
        work: of each range, pairs that were scored exactly, and queries that looked deeper.
        backend: its description.
    """
    deeper = max(queries for _, queries in work)
    rounds = (len(scores), deeper) if deeper else (len(scores),)
    return SearchResult(scores, rows, backend, rounds, sum(pairs for pairs, _ in work))


def merge_results(results: Sequence[SearchResult], width: int, where: str) -> SearchResult:
    """Return the best passages of all ranges from their results.

    Args:
        results: of each range; rows count through all ranges.
        width: passages to return for each query.
        where: the ranges were searched, for the description.
    """
    best = merge_ranges(
        len(results[0].scores), width, lambda part: [(each.scores[part], each.rows[part]) for each in results]
    )
    return merged_result(*best, list(map(_work, results)), f"{results[0].backend}, {where}")


def _work(result: SearchResult) -> tuple[int, int]:
    """Return the pairs that were scored exactly, and the queries that looked deeper."""
    return result.scored_pairs, result.rounds[1] if len(result.rounds) > 1 else 0


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


def _describe_difference(where: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return which settings of another process are not those of the first one, which is `where`; "" for none."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return ", ".join(f"{name} is {other.get(name)!r} there and {first.get(name)!r} {where}" for name in names)


def _of_first(array: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Return the numbers of process 0 in every process, bit by bit; `array` is None in others."""
    data = np.empty(0, np.uint8) if array is None else np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
    size = int(broadcast_one_to_all(np.array(len(data) // np.dtype(dtype).itemsize)))
    buffer = np.zeros(-(-size * np.dtype(dtype).itemsize // 4), np.uint32)
    buffer.view(np.uint8)[: len(data)] = data
    for start in range(0, len(buffer), WORDS):
        part = buffer[start : start + WORDS]
        part[:] = broadcast_one_to_all(part)
    return buffer.view(dtype)[:size]
