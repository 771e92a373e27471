"""The vectors of the passages that a process searches, and the search for the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.runs.run import Run
from jaxret.search.approximate.candidates import CandidateGenerator, compare_with_exact
from jaxret.search.approximate.faiss_index import FaissIndex, MappedCorpus, open_faiss_index
from jaxret.search.approximate.index_files import require_index
from jaxret.search.backends.select import Backend, select_backend, with_many_searches
from jaxret.search.proof import SearchResult, no_result
from jaxret.search.search_options import SearchOptions
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.in_memory import InMemoryCorpus, hold_in_memory, vectors_of
from jaxret.search.vectors.self_check import self_check
from jaxret.search.vectors.streaming import fits_devices
from jaxret.types import Ragged, SparseRows, TextVectors

if TYPE_CHECKING:
    from jaxret.search.approximate.seismic_index import SeismicIndex
    from jaxret.search.vectors.inverted_lists import InvertedLists


def require_options(run: Run, folder: Path, options: SearchOptions) -> None:
    """Raise ValueError if options fit no corpus that a run encodes, and FileNotFoundError if an index does not exist.

    `folder` is the folder of the encoded corpus, which need not exist yet. Filters and index parameters are ignored.
    """
    run.with_dimension(options.dimension)
    if options.index:
        require_index(folder, options.index)
    if run.model.sparse:
        _require_lists(folder, options)
        # The import of scipy takes a second, and dense vectors do not need it.
        from jaxret.search.vectors.inverted_lists import sparse_backend

        sparse_backend(options.backend)
        return
    select_backend(options.backend, run.model.vectors_per_passage is None, options.precision)
    if options.candidate_spec:
        options.candidate_spec.require_several(run.model.vectors_per_passage)


def _require_lists(folder: Path, options: SearchOptions) -> None:
    """Raise ValueError for options that a search of inverted lists does not support."""
    reason = f"{folder} has sparse vectors, which inverted lists search"
    replace(options, backend="auto", index="", index_parameters="").require_plain(reason)


@dataclass(frozen=True)
class PassageVectors:
    """The vectors of the passages that this process searches, and what finds the best of them: inverted lists,
    candidates, an index or a backend."""

    process_corpus: EncodedCorpus  # the passages of this process: all, or a range of shards
    loaded_corpus: Any  # the same passages as they are searched: in memory, on devices, mapped, or read every time
    first_row: int = 0  # row of the whole corpus at which the passages of this process begin
    backend: Backend | None = None  # None: sparse vectors, or no passages
    lists: InvertedLists | None = None
    generator: CandidateGenerator | None = None
    index: FaissIndex | SeismicIndex | None = None

    @classmethod
    def open(cls, corpus: EncodedCorpus, first_row: int, options: SearchOptions, many: bool) -> PassageVectors:
        """Load a corpus.

        Args:
            corpus: the passages of this process.
            first_row: row of the whole corpus at which they begin.
            options: the options of the search.
            many: whether there will be many searches.

        Raises the errors of `Searcher`.
        """
        vectors = _open_sparse(corpus, options, many) if corpus.sparse else _open_dense(corpus, options, many)
        return replace(vectors, first_row=first_row)

    def part(self, corpus: EncodedCorpus) -> PassageVectors:
        """Return the vectors of some passages, in memory if they fit; the backend is the same."""
        if self.lists:
            return PassageVectors(corpus, corpus, lists=type(self.lists)(corpus, True, self.lists.backend))
        assert self.backend is not None
        return PassageVectors(corpus, hold_in_memory(corpus, fits_devices(corpus, self.backend)), backend=self.backend)

    @property
    def description(self) -> str:
        """Return a line about the backend, index or candidates."""
        method = self.lists or self.generator or self.index or self.backend
        assert method is not None
        return method.description

    def is_exact(self) -> bool:
        """Return whether a search finds the best of all passages."""
        return not (self.generator or self.index)

    @property
    def location(self) -> str:
        """Return where the vectors are at the next search.

        "memory": in the host's memory. "devices": only on the devices. "disk": every search reads all of them.
        "mapped": mapped into memory; a search with an index reads a few of them.
        """
        if self.index:
            return "mapped"
        if self.lists:
            return "disk" if self.lists.blocks_in_memory is None else "memory"
        if not isinstance(self.loaded_corpus, InMemoryCorpus):
            return "disk"
        return "devices" if self.loaded_corpus.vectors is None else "memory"

    def describe_approximation(self, k: int) -> dict[str, Any] | None:
        """Return the JSON description of an approximate search for k passages; None if the search is exact."""
        if self.generator:
            return {"candidates": str(self.generator.spec)}
        return {"index": self.index.to_json(k)} if self.index else None

    def search(self, queries: TextVectors, k: int, progress: bool = False) -> SearchResult:
        """Return the best passages for the vectors of each query, with rows of the whole corpus."""
        result = self._search(queries, k, progress)
        return replace(result, rows=result.rows + self.first_row) if self.first_row else result

    def _search(self, queries: TextVectors, k: int, progress: bool) -> SearchResult:
        """Return the best passages, with rows numbered in the passages of this process."""
        if not self.process_corpus.total_rows:  # the corpus has fewer shards than processes
            return no_result(len(queries), self.description)
        if self.lists:
            assert isinstance(queries, SparseRows)
            return self.lists.search(queries, k, progress)
        if self.generator:
            assert isinstance(queries, Ragged)
            return self.generator(queries, self.loaded_corpus, k, progress)
        if self.index:
            search_index: Callable[..., SearchResult] = self.index.search
            return search_index(queries, self.loaded_corpus, k)
        assert self.backend is not None
        return search(queries, self.loaded_corpus, k, self.backend, progress)

    def measure_recall(self, queries: TextVectors, result: SearchResult) -> dict[str, Any] | None:
        """Return the recall of a result of candidates as JSON; None for other searches. To measure it, some of the
        queries are also searched exactly."""
        if not self.generator or isinstance(queries, SparseRows):
            return None
        assert self.backend is not None
        return compare_with_exact(self.generator.spec, result, queries, self.loaded_corpus, self.backend)

    def scores(self, queries: TextVectors, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the scores of each query with the passages in its rows, numbered in the passages of this process. They
        are computed in float64 and rounded to float32."""
        distinct = sorted({row for ranking in rows for row in ranking})
        vectors_of_row = dict(zip(distinct, vectors_of(self.loaded_corpus, np.array(distinct, np.int64)), strict=True))

        def score(query: np.ndarray, row: int) -> float:
            products = vectors_of_row[row].astype(np.float64) @ query.T.astype(np.float64)  # [V,U]
            return float(np.float32(products.max(axis=0).sum()))

        return [[score(query, row) for row in ranking] for query, ranking in zip(queries, rows, strict=True)]

    def best_vectors(self, queries: TextVectors, rows: np.ndarray) -> list[list[tuple[int, ...]]]:
        """Return, for each of a query's passages in `rows` [Q,K], the index of its best vector for each query
        vector."""
        lists = iter(vectors_of(self.loaded_corpus, rows.reshape(-1)))
        return [
            [tuple((next(lists).astype(np.float64) @ query.T.astype(np.float64)).argmax(axis=0).tolist()) for _ in row]
            for query, row in zip(queries, rows, strict=True)
        ]


def _open_sparse(corpus: EncodedCorpus, options: SearchOptions, many: bool) -> PassageVectors:
    """Load the inverted lists or the index of a sparse corpus."""
    # The import of scipy takes a second, and dense vectors do not need it.
    from jaxret.search.approximate.seismic_index import open_seismic_index
    from jaxret.search.vectors.inverted_lists import InvertedLists, check_sparse, sparse_backend

    _require_lists(corpus.folder, options)
    if options.index:
        index = open_seismic_index(corpus, options.index, options.index_parameters)
        return PassageVectors(corpus, MappedCorpus(corpus), index=index)
    backend = sparse_backend(options.backend)
    check_sparse(backend)
    return PassageVectors(corpus, corpus, lists=InvertedLists(corpus, many, backend))


def _open_dense(corpus: EncodedCorpus, options: SearchOptions, many: bool) -> PassageVectors:
    """Load the backend, and the index or proxies, of a dense corpus."""
    backend = select_backend(options.backend, corpus.ragged, options.precision)
    if options.index and corpus.cut[0]:
        raise ValueError(
            f"dimension={options.dimension}: the index {options.index} has all dimensions of the vectors. Leave "
            "one of the two out, or encode a corpus of that dimension (jaxret encode --dimension) and build its "
            "index"
        )
    if options.index:
        index = open_faiss_index(corpus, options.index, options.index_parameters)
        mapped_corpus = MappedCorpus(corpus)
        self_check(backend, corpus.ragged)
        return PassageVectors(corpus, mapped_corpus, backend=backend, index=index)
    loaded_corpus: Any = corpus
    if many and corpus.total_rows:
        loaded_corpus = hold_in_memory(corpus, fits_devices(corpus, backend))
    if isinstance(loaded_corpus, InMemoryCorpus):  # otherwise every search loads the blocks again
        backend = with_many_searches(backend)
    self_check(backend, corpus.ragged)
    generator = None
    if options.candidate_spec:
        proxy_backend = select_backend(options.backend, precision=options.precision)
        self_check(proxy_backend)
        generator = CandidateGenerator.open(loaded_corpus, options.candidate_spec, proxy_backend, many)
    return PassageVectors(corpus, loaded_corpus, backend=backend, generator=generator)
