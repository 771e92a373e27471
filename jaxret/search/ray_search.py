"""Search with the workers of a Ray cluster: each searches a range of the corpus's shards, and this process merges the
results.

One worker encodes the queries, and the others get its vectors, so that all use the same bits. Ranges, proofs and the
merging of results are the same as for the processes of a JAX job (`process_group.py`). If a worker dies, another one
searches its range, with the same result. This process reads no passage vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxret.runs.ray_cluster import RayWorkers, RunOpening
from jaxret.runs.run import Run
from jaxret.search.passage_vectors import PassageVectors
from jaxret.search.proof import SearchResult
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.process_group import ProcessGroup, SeparateRange, merge_results
from jaxret.types import Ragged, TextVectors

WorkerState = dict[str, Any]  # a worker keeps it between calls: a run, and a searcher of one range


def open_searcher(run: Run, folder: Path, options: SearchOptions = SearchOptions(), many: bool = False) -> Searcher:
    """Return a searcher of a corpus, which uses `options.workers` if they are set.

    Args:
        run: the run that encoded the corpus.
        folder: folder of the encoded corpus.
        options: the options of the search.
        many: whether there will be many searches.

    Raises the errors of `Searcher`.
    """
    return RaySearcher(run, folder, options, many) if options.workers else Searcher(run, folder, options, many)


@dataclass(frozen=True)
class RangePlan:
    """The ranges that workers search, and how they open them."""

    opening: RunOpening  # opens the run
    encoded_name: str  # name of the encoded corpus
    options: SearchOptions
    many: bool  # whether there will be many searches
    count: int  # number of ranges
    settings: dict[str, Any]  # values that must be the same in all workers and in this process


class RaySearcher(Searcher):
    """A searcher whose vectors are read by workers."""

    def __init__(self, run: Run, folder: Path, options: SearchOptions, many: bool = False) -> None:
        assert options.workers is not None
        self.workers: RayWorkers = options.workers
        super().__init__(run, folder, options, many, ProcessGroup(0, 0))  # this process has no range

    def _open_vectors(self, options: SearchOptions, many: bool) -> PassageVectors:
        arguments = {"query_length": self.run.tokenizer.query_length, "attention": self.workers.attention}
        run, step = str(self.run.workdir), str(self.run.checkpoint["step"])
        opening = RunOpening(run, step, self.workers.platform, arguments)
        plain = replace(options, workers=None)
        self._plan = RangePlan(opening, self.folder.name, plain, many, self.workers.count, self.settings)
        _, no_passages = self.encoded_corpus.in_range(self.group.number, self.group.count)
        return PassageVectors(no_passages, no_passages)

    def _embed(self, tokens: Ragged, progress: bool) -> TextVectors:
        call = self._plan.opening, self.run.model.dimension, tokens
        return self.workers.run(_encode_queries, [call])[0]

    def _search_rows(self, vectors: TextVectors, k: int, progress: bool = False) -> SearchResult:
        queries, count = self.workers.share(vectors), self._plan.count
        results = self.workers.run(_search_range, [(self._plan, number, queries, k) for number in range(count)])
        return merge_results(results, min(k, self.encoded_corpus.total_rows), f"in each of {count} workers")

    def scores(self, vectors: TextVectors, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        queries, calls = self.workers.share(vectors), []
        for number in range(self._plan.count):
            first, stop = self.encoded_corpus.rows_in_range(number, self._plan.count)
            range_rows = [[row for row in ranking if first <= row < stop] for ranking in rows]
            calls.append((self._plan, number, queries, range_rows))
        parts = self.workers.run(_score_rows, calls)
        by_row: list[dict[int, float]] = [{} for _ in rows]
        for (*_, range_rows), part in zip(calls, parts, strict=True):
            for scores, ranking, values in zip(by_row, range_rows, part, strict=True):
                scores.update(zip(ranking, values, strict=True))
        return [[scores[row] for row in ranking] for scores, ranking in zip(by_row, rows, strict=True)]


def _open_once(state: WorkerState, opening: RunOpening) -> Run:
    if state.get("opening") != opening:
        state.clear()
        state.update(run=opening.open(), opening=opening)
    run: Run = state["run"]
    return run


def _range_searcher(state: WorkerState, plan: RangePlan, number: int) -> Searcher:
    run = _open_once(state, plan.opening)
    if state.get("range") != (plan, number):
        state.pop("searcher", None)  # frees its memory before the new one is opened
        group = SeparateRange(number, plan.count, plan.settings)
        state["searcher"] = Searcher(run, run.workdir.embeddings(plan.encoded_name), plan.options, plan.many, group)
        state["range"] = plan, number
    searcher: Searcher = state["searcher"]
    return searcher


def _encode_queries(state: WorkerState, opening: RunOpening, dimension: int, tokens: Ragged) -> TextVectors:
    """Return the vectors of queries, cut to a dimension."""
    run = _open_once(state, opening)
    run = run if run.model.dimension == dimension else run.with_dimension(dimension)
    return run.embedder()(tokens, "query")


def _search_range(state: WorkerState, plan: RangePlan, number: int, vectors: TextVectors, k: int) -> SearchResult:
    """Return the best passages of a range, with rows of the corpus."""
    return _range_searcher(state, plan, number).vectors.search(vectors, k)


def _score_rows(
    state: WorkerState, plan: RangePlan, number: int, vectors: TextVectors, rows: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the scores of each query with passages of a range; `rows` are rows of the corpus for each query."""
    range_vectors = _range_searcher(state, plan, number).vectors
    return range_vectors.scores(vectors, [[row - range_vectors.first_row for row in ranking] for ranking in rows])
