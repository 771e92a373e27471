"""Search with all processes of a JAX job: each searches a range of the corpus's shards, and the results are merged.

Process 0 encodes the queries and sends the vectors to the others, so that all use the same bits. Each process finds the
k best passages of its range and proves them (`proof.py`). The k best passages of the corpus are also among the k best
of their ranges. So the k best results of all ranges, by score and then by row, are the k best of the corpus.
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
from jaxret.search.proof import SearchResult
from jaxret.search.vectors.exact import sorted_by_rule
from jaxret.types import Ragged, SparseRows, TextVectors, word_dtype

HIT_BYTES = 12  # bytes of a passage in a ranking: score and row
MESSAGE_WORDS = 2**22  # four-byte words that a process sends at a time: 16 MiB

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that search together. All call the same methods in the same order. A single process sends
    nothing."""

    number: int = 0  # number of this process
    count: int = 1  # number of processes

    @classmethod
    def of_job(cls) -> ProcessGroup:
        """Return the group of all processes of this JAX job."""
        return cls(jax.process_index(), jax.process_count())

    @property
    def leads(self) -> bool:
        """Return whether this process reads passage ids, prints and writes."""
        return self.number == 0

    def agree_on(self, make: Callable[[], T]) -> T:
        """Return the result of `make`. If it raises in one process, every process raises the error (`agreement`)."""
        with agreement() if self.count > 1 else nullcontext():
            return make()

    def require_same(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError in every process if the settings (JSON values) of a process differ from process 0."""
        if self.count == 1:
            return
        first, *later_settings = map(json.loads, agreed_texts(json.dumps(settings)))
        for number, process_settings in enumerate(later_settings, 1):
            if difference := _describe_difference("in process 0", first, process_settings):
                raise ValueError(
                    f"process {number} searches with other settings: {difference}. Start the same command in all "
                    "processes, on the same files"
                )

    def vectors_of_first(self, make: Callable[[], TextVectors], sparse: bool, dimension: int) -> TextVectors:
        """Return the vectors that `make` returns in process 0, in every process. Other processes do not call `make`.

        `sparse` and `dimension` describe the vectors.
        """
        if self.count == 1:
            return make()
        vectors = self.agree_on(lambda: make() if self.leads else None)
        offsets = _of_first(None if vectors is None else vectors.offsets, np.int64)
        if sparse:
            words = _of_first(vectors.words if isinstance(vectors, SparseRows) else None, word_dtype(dimension))
            weights = _of_first(vectors.weights if isinstance(vectors, SparseRows) else None, np.float32)
            return SparseRows(words, weights, offsets, dimension)
        flat = _of_first(vectors.flat if isinstance(vectors, Ragged) else None, np.float32)
        return Ragged(flat.reshape(-1, dimension), offsets)

    def merge(self, result: SearchResult, width: int) -> SearchResult:
        """Return the best passages of all ranges, the same in every process.

        `result` has the best passages of this process's range. `width` is the number of passages to return for each
        query: k, or all passages of a smaller corpus.
        """
        if self.count == 1:
            return result
        queries, own_width = result.scores.shape
        scores = np.full((queries, width), -np.inf, np.float32)
        rows = np.full((queries, width), -1, np.int64)
        scores[:, :own_width], rows[:, :own_width] = result.scores, result.rows

        def gather(part: slice) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            # [processes, queries, width], [processes, queries, 2 * width]
            all_scores, all_rows = process_allgather((scores[part], rows[part].view(np.uint32)))
            return zip(all_scores, (process_rows.view(np.int64) for process_rows in all_rows), strict=True)

        best = merge_ranges(queries, width, gather)
        work = process_allgather(np.array(_work(result)).view(np.uint32)).view(np.int64).tolist()
        return merged_result(*best, work, f"{result.backend}, in each of {self.count} processes")


@dataclass(frozen=True)
class SeparateRange(ProcessGroup):
    """A range of shards that is searched on its own; the caller merges the results of all ranges."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # the settings that all ranges must have

    def agree_on(self, make: Callable[[], T]) -> T:
        return make()

    def require_same(self, settings: Mapping[str, Any]) -> None:
        if difference := _describe_difference("of the command", self.settings, settings):
            raise ValueError(f"a worker searches with other settings: {difference}. All hosts need the same files")


def merge_ranges(
    queries: int, width: int, ranges: Callable[[slice], Iterable[tuple[np.ndarray, np.ndarray]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and rows [Q,width] of the best passages of all ranges.

    `ranges` is a function that returns the scores and rows of a slice of the queries in each range. Rows are rows of
    the corpus.
    """
    scores, rows = np.empty((queries, width), np.float32), np.empty((queries, width), np.int64)
    for start in range(0, queries, step := max(1, 4 * MESSAGE_WORDS // (HIT_BYTES * width))):
        part = slice(start, start + step)
        all_scores, all_rows = (np.concatenate(arrays, axis=1) for arrays in zip(*ranges(part), strict=True))
        best = sorted_by_rule(all_scores, all_rows)
        scores[part], rows[part] = best[0][:, :width], best[1][:, :width]
    return scores, rows


def merged_result(scores: np.ndarray, rows: np.ndarray, work: Sequence[tuple[int, int]], backend: str) -> SearchResult:
    """Return the result of all ranges.

    Args:
        scores: scores of the best passages (`merge_ranges`).
        rows: rows of these passages.
        work: pairs that were scored exactly in each range, and queries that needed a second round.
        backend: description of the backend.
    """
    deeper = max(queries for _, queries in work)
    rounds = (len(scores), deeper) if deeper else (len(scores),)
    return SearchResult(scores, rows, backend, rounds, sum(pairs for pairs, _ in work))


def merge_results(results: Sequence[SearchResult], width: int, location: str) -> SearchResult:
    """Return the best passages of all ranges.

    `results` are the results of the ranges, with rows of the corpus; `width` is the number of passages to return for
    each query; `location` is the part of the description that says where the ranges were searched.
    """
    best = merge_ranges(
        len(results[0].scores), width, lambda part: [(result.scores[part], result.rows[part]) for result in results]
    )
    return merged_result(*best, list(map(_work, results)), f"{results[0].backend}, {location}")


def _work(result: SearchResult) -> tuple[int, int]:
    """Return the number of pairs that were scored exactly, and the number of queries that needed a second round."""
    return result.scored_pairs, result.rounds[1] if len(result.rounds) > 1 else 0


@contextmanager
def searching(all_processes: bool, platform: str, flags: Mapping[str, str]) -> Iterator[None]:
    """Run a search in the block, in this process or in all processes of a job.

    With several processes, only process 0 prints, and an error in one process is raised in all. Raises ValueError if a
    process lacks the platform or has other flags.
    """
    with agreement() if all_processes else nullcontext():
        require_platform(platform, "--platform")
        group = ProcessGroup.of_job() if all_processes else ProcessGroup()
        group.require_same(flags)
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if group.leads else nowhere):
            yield


def _describe_difference(location: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return a description of the settings that differ; "" if none differs. `location` says where the first
    settings are."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return ", ".join(f"{name} is {second.get(name)!r}, but {first.get(name)!r} {location}" for name in names)


def _of_first(array: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Return the array of process 0, flat and with the same bits, in every process; `array` is None in the others."""
    data = np.empty(0, np.uint8) if array is None else np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
    size = int(broadcast_one_to_all(np.array(len(data) // np.dtype(dtype).itemsize)))
    buffer = np.zeros(-(-size * np.dtype(dtype).itemsize // 4), np.uint32)
    buffer.view(np.uint8)[: len(data)] = data
    for start in range(0, len(buffer), MESSAGE_WORDS):
        part = buffer[start : start + MESSAGE_WORDS]
        part[:] = broadcast_one_to_all(part)
    return buffer.view(dtype)[:size]
