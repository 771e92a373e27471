"""Approximate search: an index of FAISS finds candidates among the vectors of an encoded corpus, and these are scored
and ordered exactly, as in exact search (`exact.py`). Passages that the index does not find are missing; its recall is
measured when it is built (`faiss_build.py`), and stored in its manifest (`index_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.shards import ShardError
from jaxret.search.approximate.faiss_factory import effort_of, faiss_library, parse_parameters, search_parameters
from jaxret.search.approximate.index_files import BUILD, check_index_file, open_index_manifest
from jaxret.search.approximate.measured_index import MeasuredIndex
from jaxret.search.proof import SearchResult
from jaxret.search.vectors.exact import query_vectors, score_candidates
from jaxret.search.vectors.single_vector import QUERY_ROWS, SingleVectors
from jaxret.storage.file_state import MISSING, FileState, file_state
from jaxret.types import Ragged


@dataclass(frozen=True)
class FaissIndex(MeasuredIndex):
    """An index of FAISS with all vectors of a corpus; vector v of row r has the number r * V + v."""

    index: Any  # FAISS's object
    factory: str
    vectors_per_passage: int
    largest_norm: float  # upper bound of the norms of all vectors
    parameters: str = ""  # FAISS's search parameters, in its notation
    recall_record: Mapping[str, Any] | None = None  # the recall in the manifest
    file: Path | None = None  # the file that is mapped into memory
    state: FileState = MISSING  # the state of the file when it was opened

    @property
    def description(self) -> str:
        """Return a line with library, version and index."""
        return f"FAISS {faiss_library().__version__}, {self.factory}"

    def search(self, queries: np.ndarray | Ragged, corpus: MappedCorpus, k: int) -> SearchResult:
        """Return the best k passages among the candidates of each query [Q,D] float32, or all of a smaller corpus.

        Scores and order are the same as in exact search.

        Raises ValueError for queries that exact search refuses, and if the index cannot find k passages with any
        parameters; ShardError if a mapped file was changed.
        """
        self._require_unwritten()
        vectors, count = query_vectors(queries, corpus), min(k, corpus.total_rows)
        assert isinstance(vectors, SingleVectors), "an index has no lists of vectors"
        rows = self._find_rows(vectors.vectors, count)
        corpus.require_unwritten(rows[rows >= 0])
        best = score_candidates(vectors, rows, corpus, count, self.largest_norm)
        return SearchResult(*best, self.description, (len(vectors),), int((rows >= 0).sum()))

    def _require_unwritten(self) -> None:
        """Raise ShardError if the mapped file was changed: reading a part that was cut off would kill the process.

        A new file of the same name is not an error, because the old one stays mapped.
        """
        current_state = file_state(self.file) if self.file else MISSING
        if current_state.inode == self.state.inode and (difference := self.state.difference(current_state)):
            raise ShardError(f"{self.file} {difference}; {BUILD}")

    def _find_rows(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Return at least `count` rows for each query, int64 [Q,C], padded with -1.

        If the index returns fewer (few lists were searched, or many vectors belong to the same passages), the effort
        is doubled.
        """
        name, largest = effort_of(self.index)
        parameters, depth = parse_parameters(self.index, self.parameters), self.candidates(count)
        rows_of: list[np.ndarray] = [np.empty(0, np.int64)] * len(queries)
        todo = np.arange(len(queries))
        while True:
            depth, short = min(depth, self.index.ntotal), []
            for start in range(0, len(todo), QUERY_ROWS):
                part = todo[start : start + QUERY_ROWS]
                _, vectors = self.index.search(queries[part], depth, params=search_parameters(self.index, parameters))
                for query, numbers in zip(part, vectors, strict=True):
                    rows_of[query] = np.unique(numbers[numbers >= 0] // self.vectors_per_passage)
                    if len(rows_of[query]) < count:
                        short.append(int(query))
            if not short:
                break
            if depth == self.index.ntotal and parameters.get(name, 0) >= largest:
                raise ValueError(
                    f"the index {self.factory} finds only {len(rows_of[short[0]]):,} passages for query {short[0]}, "
                    f"fewer than k = {count:,}: lower k, or search exactly, without the index"
                )
            todo, depth = np.array(short), 2 * depth
            if name:
                parameters[name] = float(min(2 * parameters.get(name, 1), largest))
        width = max((len(rows) for rows in rows_of), default=0)
        return np.stack([np.append(rows, np.full(width - len(rows), -1, np.int64)) for rows in rows_of])


class MappedCorpus:
    """A corpus whose shards are mapped into memory once; each of many searches reads a few rows."""

    def __init__(self, encoded_corpus: EncodedCorpus) -> None:
        self.total_rows, self.dimension, self.ragged = (
            encoded_corpus.total_rows,
            encoded_corpus.dimension,
            encoded_corpus.ragged,
        )
        self.describe, self.ids, self.require_unwritten = (
            encoded_corpus.describe,
            encoded_corpus.ids,
            encoded_corpus.require_unwritten,
        )
        self._shards = list(encoded_corpus)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(self._shards)


def require_one_query_vector(encoded_corpus: EncodedCorpus) -> int:
    """Return V, the vectors of a passage. Raises ValueError if the numbers differ, or the vectors are sparse."""
    if encoded_corpus.sparse:
        raise ValueError(f"{encoded_corpus.folder} has sparse vectors, for which FAISS has no index; search exactly")
    if encoded_corpus.ragged:
        raise ValueError(
            f"the passages in {encoded_corpus.folder} have different numbers of vectors (late interaction), for which "
            "there is no approximate index; search exactly"
        )
    return encoded_corpus.shards[0].vectors_per_row


def open_faiss_index(encoded_corpus: EncodedCorpus, name: str, parameters: str = "") -> FaissIndex:
    """Open an index of a corpus after checking its digest; `parameters` "" means the parameters in its manifest.

    Raises FileNotFoundError if no index has the name, ShardError if it is damaged, ValueError if it was built from
    other vectors than the corpus has now, or has no such parameter.
    """
    require_one_query_vector(encoded_corpus)
    folder, manifest = open_index_manifest(encoded_corpus, name)
    state = file_state(folder / "index.faiss")
    check_index_file(folder, manifest)
    index = replace(load_faiss_index(folder, manifest), state=state)
    try:
        parse_parameters(index.index, parameters)
    except ValueError as error:
        raise ValueError(f"index_parameters={error}") from error
    return replace(index, parameters=parameters or manifest["recall"]["parameters"], recall_record=manifest["recall"])


def load_faiss_index(folder: Path, manifest: Mapping[str, Any]) -> FaissIndex:
    """Map the index in a folder into memory, and return it. Raises ShardError if FAISS cannot read it."""
    faiss, path = faiss_library(), folder / "index.faiss"
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ShardError(
            f"{path}: FAISS {faiss.__version__} cannot read an index of FAISS {manifest['made']['faiss']}; {BUILD}"
        ) from error
    if (index.ntotal, index.d) != (manifest["vectors"], manifest["dimension"]):
        raise ShardError(
            f"{path} has {index.ntotal:,} vectors of {index.d} dimensions; its manifest says {manifest['vectors']:,} "
            f"of {manifest['dimension']}. {BUILD.capitalize()}"
        )
    norm, state = manifest["largest_norm"], file_state(path)
    return FaissIndex(index, manifest["factory"], manifest["vectors_per_passage"], norm, file=path, state=state)
