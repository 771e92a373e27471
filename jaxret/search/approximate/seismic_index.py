"""Approximate search of sparse vectors with Seismic (Bruch, Nardini, Rulli & Venturini 2024).

Seismic finds candidates, which are scored and ordered exactly. Its recall is measured after the build.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.shards import ShardError
from jaxret.search.approximate.faiss_index import MappedCorpus
from jaxret.search.approximate.index_files import BUILD, check_index_file, open_index_manifest
from jaxret.search.approximate.measured_index import FACTOR, MeasuredIndex
from jaxret.search.proof import SearchResult
from jaxret.search.vectors.exact import score_candidates
from jaxret.search.vectors.inverted_lists import SparseQueries, require_same_vocabulary
from jaxret.types import SparseRows

FACTORY_NAME = "seismic"  # the beginning of the factory strings of these indexes; build settings may follow
# The settings of a build and of a search, and their types. A build setting that is not given has Seismic's default.
BUILD_SETTINGS: dict[str, type] = {
    "n_postings": int,
    "centroid_fraction": float,
    "min_cluster_size": int,
    "summary_energy": float,
    "max_fraction": float,
    "doc_cut": int,
}
SEARCH_SETTINGS: dict[str, type] = {"query_cut": int, "heap_factor": float, FACTOR: float}
_DEFAULT_SEARCH = {"query_cut": 10, "heap_factor": 0.7}


def seismic_library() -> Any:
    """Return the module seismic. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("seismic")
    except ImportError as error:
        raise ValueError("approximate indexes of sparse vectors need Seismic: pip install 'jaxret[sparse]'") from error


def parse_settings(text: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the settings in a text like "query_cut=10,heap_factor=0.7".

    `kinds` are the allowed names and their types. Raises ValueError for other names and for numbers of another type.
    """
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"{text}: Seismic has no setting {name!r}; it has {', '.join(kinds)}")
        pattern = r"[0-9]{1,9}" if kinds[name] is int else r"[0-9]{1,9}(\.[0-9]+)?"
        if not re.fullmatch(pattern, value) or not float(value):
            kind = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"{text}: {part!r} must be {name}=NUMBER with {kind} above 0")
        if name == FACTOR and float(value) < 1:
            raise ValueError(
                f"{text}: {FACTOR} is {value}; it must be at least 1, or there are fewer candidates than k"
            )
        values[name] = kinds[name](value)
    return values


def parse_factory(factory: str) -> dict[str, Any]:
    """Return the build settings in a factory string. Raises ValueError for a string that is not Seismic's."""
    name, _, settings = factory.partition(",")
    if name != FACTORY_NAME:
        raise ValueError(
            f"factory={factory}: for sparse vectors it must be {FACTORY_NAME!r}, or {FACTORY_NAME},n_postings=2000,..."
        )
    try:
        return parse_settings(settings, BUILD_SETTINGS)
    except ValueError as error:
        raise ValueError(f"factory={factory}: {error}") from error


@dataclass(frozen=True)
class SeismicIndex(MeasuredIndex):
    """An index of Seismic with all rows of a sparse corpus; the name of a passage in it is its row."""

    index: Any  # Seismic's object
    factory: str
    largest_norm: float  # upper bound of the norms of all passages
    parameters: str = ""
    recall_record: Mapping[str, Any] | None = None  # the recall in the manifest

    @property
    def description(self) -> str:
        """Return a line with library and settings."""
        return f"Seismic, {self.factory}"

    def search(self, queries: SparseRows, corpus: MappedCorpus, k: int) -> SearchResult:
        """Return the best k passages among the candidates of each query, with the scores and order of exact search.

        If the index finds fewer than k, the lowest rows of the corpus are candidates, too.

        Raises ValueError for queries of another vocabulary, and ShardError if a mapped file was changed.
        """
        require_same_vocabulary(queries, corpus.dimension)
        count = min(k, corpus.total_rows)
        rows = self._find_rows(queries, count, corpus.total_rows)
        corpus.require_unwritten(rows[rows >= 0])
        best = score_candidates(SparseQueries(queries), rows, corpus, count, self.largest_norm)
        return SearchResult(*best, self.description, (len(queries),), int((rows >= 0).sum()))

    def _find_rows(self, queries: SparseRows, count: int, total_rows: int) -> np.ndarray:
        """Return at least `count` rows for each query, int64 [Q,C], padded with -1."""
        settings = _DEFAULT_SEARCH | parse_settings(self.parameters, SEARCH_SETTINGS)
        settings.pop(FACTOR, None)
        text = seismic_library().get_seismic_string()
        bounds = list(pairwise(queries.offsets.tolist()))
        hits = self.index.batch_search(
            np.arange(len(queries)).astype(text),
            [queries.words[start:stop].astype(text) for start, stop in bounds],
            [queries.weights[start:stop].astype(np.float32) for start, stop in bounds],
            k=min(self.candidates(count), total_rows),
            **settings,
        )
        rows_of: list[np.ndarray] = [np.empty(0, np.int64)] * len(queries)
        for query_hits in hits:
            for query in {int(hit[0]) for hit in query_hits}:
                rows_of[query] = np.unique([int(hit[2]) for hit in query_hits])
        for query, rows in enumerate(rows_of):
            if len(rows) < count:
                rows_of[query] = np.union1d(rows, np.setdiff1d(np.arange(count), rows)[: count - len(rows)])
        width = max(map(len, rows_of), default=0)
        return np.stack([np.append(rows, np.full(width - len(rows), -1, np.int64)) for rows in rows_of])


def open_seismic_index(encoded_corpus: EncodedCorpus, name: str, parameters: str = "") -> SeismicIndex:
    """Open an index of a sparse corpus after checking its digest; `parameters` "" means those in its manifest.

    Raises the errors of `open_index_manifest`, ShardError if the index is damaged, and ValueError for a parameter that
    does not exist.
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
    """Load the index in a folder into memory, and return it. Raises ShardError if Seismic cannot read it."""
    path = folder / manifest["index"]["file"]
    try:
        index = seismic_library().SeismicIndex.load(str(path))
    except OSError as error:
        raise ShardError(f"{path}: this version of Seismic cannot read it ({error}); {BUILD}") from error
    return SeismicIndex(index, manifest["factory"], manifest["largest_norm"])
