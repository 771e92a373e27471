"""Approximate search of sparse vectors: Seismic (Bruch, Nardini, Rulli & Venturini 2024) finds candidates among the
words of an encoded corpus, and these are scored and ordered exactly. Its recall is measured when it is built."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.shards import ShardError
from jaxret.search.approximate.faiss_index import MappedCorpus
from jaxret.search.approximate.index_files import BUILD, check_index_file, open_index_manifest
from jaxret.search.approximate.measured_index import FACTOR, MeasuredIndex
from jaxret.search.exact import score_candidates
from jaxret.search.inverted_lists import SparseQueries, require_same_vocabulary
from jaxret.search.proof import SearchResult
from jaxret.types import SparseRows

NAME = "seismic"  # the factory of these indexes, with settings of the build behind it
# Settings of a build and of a search: their least values, and the kind of number. Seismic's defaults are the build's.
BUILD_SETTINGS: dict[str, type] = {
    "n_postings": int,
    "centroid_fraction": float,
    "min_cluster_size": int,
    "summary_energy": float,
    "max_fraction": float,
    "doc_cut": int,
}
SEARCH_SETTINGS: dict[str, type] = {"query_cut": int, "heap_factor": float, FACTOR: float}
DEFAULT = {"query_cut": 10, "heap_factor": 0.7}


def seismic_library() -> Any:
    """Return the module. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("seismic")
    except ImportError as error:
        raise ValueError("approximate indexes of sparse vectors need Seismic: pip install 'jaxret[sparse]'") from error


def parse_settings(text: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return settings from "query_cut=10,heap_factor=0.7". Raises ValueError for other names and for other numbers."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"{text}: Seismic has no setting {name!r}; it has {', '.join(kinds)}")
        pattern = r"[0-9]{1,9}" if kinds[name] is int else r"[0-9]{1,9}(\.[0-9]+)?"
        if not re.fullmatch(pattern, value) or not float(value):
            kind = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"{text}: {name}=NUMBER is expected, {kind} above 0, not {part!r}")
        if name == FACTOR and float(value) < 1:
            raise ValueError(
                f"{text}: {FACTOR} is {value}; it must be at least 1, as fewer candidates than k leave gaps"
            )
        values[name] = kinds[name](value)
    return values


def parse_factory(factory: str) -> dict[str, Any]:
    """Return the settings of a factory string. Raises ValueError for another string."""
    name, _, settings = factory.partition(",")
    if name != NAME:
        raise ValueError(f"factory={factory}: indexes of sparse vectors are {NAME!r}, or {NAME},n_postings=2000,...")
    try:
        return parse_settings(settings, BUILD_SETTINGS)
    except ValueError as error:
        raise ValueError(f"factory={factory}: {error}") from error


@dataclass(frozen=True)
class SeismicIndex(MeasuredIndex):
    """An index with the rows of a sparse corpus in it; its passages are named by their row."""

    index: Any  # Seismic's
    factory: str
    largest_norm: float  # of the passages, an upper bound
    parameters: str = ""
    recall_record: Mapping[str, Any] | None = None

    @property
    def description(self) -> str:
        """One line: library and settings."""
        return f"Seismic, {self.factory}"

    def search(self, queries: SparseRows, corpus: MappedCorpus, k: int) -> SearchResult:
        """Return the best k passages among the candidates of each query, with the scores and in the order of exact
        search. Where the index has fewer than k, the lowest rows of the corpus are candidates, too.

        Raises ValueError for queries of another vocabulary, ShardError where a mapped file was written to.
        """
        require_same_vocabulary(queries, corpus.dimension)
        count = min(k, corpus.total_rows)
        rows = self._rows(queries, count, corpus.total_rows)
        corpus.require_unwritten(rows[rows >= 0])
        best = score_candidates(SparseQueries(queries), rows, corpus, count, self.largest_norm)
        return SearchResult(*best, self.description, (len(queries),), int((rows >= 0).sum()))

    def _rows(self, queries: SparseRows, count: int, total_rows: int) -> np.ndarray:
        """Return at least `count` rows for each query, int64 [Q,C], -1 where there are no more."""
        settings = DEFAULT | parse_settings(self.parameters, SEARCH_SETTINGS)
        settings.pop(FACTOR, None)
        text = seismic_library().get_seismic_string()
        hits = self.index.batch_search(
            np.arange(len(queries)).astype(text),
            [queries.words[start:stop].astype(text) for start, stop in _bounds(queries)],
            [queries.weights[start:stop].astype(np.float32) for start, stop in _bounds(queries)],
            k=min(self.candidates(count), total_rows),
            **settings,
        )
        rows_of: list[np.ndarray] = [np.empty(0, np.int64)] * len(queries)
        for of_query in hits:
            for query in {int(hit[0]) for hit in of_query}:
                rows_of[query] = np.unique([int(hit[2]) for hit in of_query])
        for query, rows in enumerate(rows_of):
            if len(rows) < count:
                rows_of[query] = np.union1d(rows, np.setdiff1d(np.arange(count), rows)[: count - len(rows)])
        width = max(map(len, rows_of), default=0)
        return np.stack([np.append(rows, np.full(width - len(rows), -1, np.int64)) for rows in rows_of])


def _bounds(queries: SparseRows) -> list[tuple[int, int]]:
    return list(zip(queries.offsets[:-1].tolist(), queries.offsets[1:].tolist(), strict=True))


def open_seismic_index(encoded_corpus: EncodedCorpus, name: str, parameters: str = "") -> SeismicIndex:
    """Open an index of a sparse corpus, verified, with search parameters ("": those that its manifest chose).

    Raises as `open_index_manifest` does; ShardError if it is damaged, ValueError for a parameter that does not exist.
    """
    folder, manifest = open_index_manifest(encoded_corpus, name)
    check_index_file(folder, manifest)
    try:
        parse_settings(parameters, SEARCH_SETTINGS)
    except ValueError as error:
        raise ValueError(f"index_parameters={error}") from error
    recall = manifest["recall"]
    index = load_seismic_index(folder, manifest)
    return replace(index, parameters=parameters or recall["parameters"], recall_record=recall)


def load_seismic_index(folder: Path, manifest: Mapping[str, Any]) -> SeismicIndex:
    """Return the index of a folder, in memory. Raises ShardError if Seismic cannot read it."""
    path = folder / manifest["index"]["file"]
    try:
        index = seismic_library().SeismicIndex.load(str(path))
    except OSError as error:
        raise ShardError(f"{path}: this version of Seismic cannot read it ({error}); {BUILD}") from error
    return SeismicIndex(index, manifest["factory"], manifest["largest_norm"])
