"""Approximate search: an index of FAISS finds candidates among the vectors of an encoded corpus, and these are scored
and ordered exactly, as in exact search (`exact.py`). Passages that the index does not find are missing; its recall is
measured when it is built (`faiss_build.py`), and stored in its manifest.

<corpus>/indexes/<name>/index.faiss    the index, FAISS's own format
                        manifest.json  written last: how it was built, of which vectors, its digest, its recall
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.shards import ShardError
from jaxret.runs.workdir import require_plain_name
from jaxret.search.approximate.faiss_factory import (
    FACTOR,
    effort_of,
    faiss_library,
    parse_parameters,
    search_parameters,
)
from jaxret.search.exact import query_vectors, score_candidates
from jaxret.search.proof import SearchResult
from jaxret.search.single_vector import QUERY_ROWS, SingleVectors
from jaxret.storage import atomic
from jaxret.storage.atomic import sha256_file, sha256_json
from jaxret.storage.file_state import MISSING, FileState, file_state
from jaxret.types import Ragged

KEYS = {"factory", "training", "corpus", "vectors", "dimension", "vectors_per_passage", "largest_norm", "made", "index"}
CANDIDATES = 200  # vectors that an index returns for a query at least, unless k_factor_rf is given
_BUILD = "build it again with jaxret index"


@dataclass(frozen=True)
class FaissIndex:
    """An index with the vectors of a corpus in it; vector v of row r has the number r * V + v."""

    index: Any  # FAISS's
    factory: str
    vectors_per_passage: int
    largest_norm: float  # of the vectors, an upper bound
    parameters: str = ""  # FAISS's search parameters, in its notation
    measured: Mapping[str, Any] | None = None  # the recall of its manifest
    file: Path | None = None  # that is mapped into memory
    state: FileState = MISSING  # of the file, when it was opened

    @property
    def description(self) -> str:
        """One line: library, version, index."""
        return f"FAISS {faiss_library().__version__}, {self.factory}"

    def candidates(self, k: int) -> int:
        """Return how many vectors the index returns for each query of a search for k passages, at least."""
        factor = parse_parameters(self.index, self.parameters).get(FACTOR)
        return math.ceil(k * factor) if factor else max(k, CANDIDATES)

    def recall(self, k: int) -> dict[str, float] | None:
        """Return the recall that was measured with these parameters, by depth; None if it was not measured."""
        if self.candidates(k) > CANDIDATES and FACTOR not in self.parameters:
            return None
        rows = (self.measured or {}).get("measured", [])
        return next((dict(row["recall"]) for row in rows if row["parameters"] == self.parameters), None)

    def to_json(self, k: int) -> dict[str, Any]:
        """Return the entry of this index in the results of a search for k passages."""
        return {
            "factory": self.factory,
            "parameters": self.parameters,
            "candidates": self.candidates(k),
            "recall": self.recall(k),
        }

    def describe(self, k: int) -> str:
        """Return a line on a search for k passages: parameters, candidates, recall."""
        parts = [self.factory, self.parameters, f"{self.candidates(k):,} candidates scored exactly"]
        line = ", ".join(part for part in parts if part)
        if (recall := self.recall(k)) is None:
            return f"{line}; its recall with these settings was not measured"
        depths = ", ".join(f"@{depth} {value:.3f}" for depth, value in recall.items())
        questions = (self.measured or {})["questions"]
        return f"{line}; recall of exact search {depths}, measured with {questions['count']:,} {questions['source']}"

    def search(self, queries: np.ndarray | Ragged, corpus: MappedCorpus, k: int) -> SearchResult:
        """Return the best k passages among the candidates of each query [Q,D] float32, with the scores and in the order
        of exact search; fewer only where the corpus has fewer.

        Raises ValueError for queries that exact search refuses, and where no parameters find as many; ShardError where
        a mapped file was written to.
        """
        self._require_unwritten()
        vectors, count = query_vectors(queries, corpus), min(k, corpus.total_rows)
        assert isinstance(vectors, SingleVectors), "there are no indexes of lists"
        rows = self._rows(vectors.vectors, count)
        corpus.require_unwritten(rows[rows >= 0])
        scored = score_candidates(vectors, rows, corpus, count, self.largest_norm)
        return SearchResult(*scored, self.description, (len(vectors),), int((rows >= 0).sum()))

    def _require_unwritten(self) -> None:
        """Raise ShardError if the file was written to: to read what was cut off ends the process. A file in its place
        changes nothing in memory."""
        now = file_state(self.file) if self.file else MISSING
        if now.inode == self.state.inode and (difference := self.state.difference(now)):
            raise ShardError(f"{self.file} {difference}; {_BUILD}")

    def _rows(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Return at least `count` rows for each query, int64 [Q,C], -1 where there are no more. Where an index gives
        fewer (few lists were looked at, or many vectors are of the same passages), it looks twice as hard."""
        name, most = effort_of(self.index)
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
                    short += [int(query)] * (len(rows_of[query]) < count)
            if not short:
                break
            if depth == self.index.ntotal and parameters.get(name, 0) >= most:
                raise ValueError(
                    f"the index {self.factory} reaches {len(rows_of[short[0]]):,} passages for query {short[0]}, "
                    f"{count:,} were requested: request fewer, or leave the index out (exact search has them)"
                )
            todo, depth = np.array(short), 2 * depth
            if name:
                parameters[name] = float(min(2 * parameters.get(name, 1), most))
        width = max((len(rows) for rows in rows_of), default=0)
        return np.stack([np.append(rows, np.full(width - len(rows), -1, np.int64)) for rows in rows_of])


class MappedCorpus:
    """A corpus whose shards are mapped into memory once for many searches, each of which reads a few rows."""

    def __init__(self, corpus: EncodedCorpus) -> None:
        self.total_rows, self.dimension, self.ragged = corpus.total_rows, corpus.dimension, corpus.ragged
        self.describe, self.ids, self.require_unwritten = corpus.describe, corpus.ids, corpus.require_unwritten
        self._shards = list(corpus)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(self._shards)


def index_folder(corpus: Path, name: str) -> Path:
    """Return the folder of an index of an encoded corpus. Raises ValueError for a name that is no plain name."""
    return corpus / "indexes" / require_plain_name("the name of an index", name)


def identity_of(corpus: EncodedCorpus) -> dict[str, Any]:
    """Return what identifies the vectors of an index: the corpus, and a digest of all vectors."""
    digests = [[entry["vectors"]["sha256"] for entry in part.manifest.shards] for part in corpus.shards]
    return {**corpus.corpus, "vectors": sha256_json(digests)}


def require_one_query_vector(corpus: EncodedCorpus) -> int:
    """Return V. Raises ValueError where every passage has its own number of vectors."""
    if corpus.sparse:
        raise ValueError(
            f"the vectors in {corpus.folder} are weights of words, of which FAISS has no indexes; search exactly"
        )
    if corpus.ragged:
        raise ValueError(
            f"{corpus.folder} has another number of vectors for each passage (as under late interaction): there are no "
            "approximate indexes of these; search exactly"
        )
    return corpus.shards[0].vectors_per_row


def read_index_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an index. Raises FileNotFoundError, and ShardError if it is damaged."""
    path = folder / "manifest.json"
    try:
        manifest = atomic.read_with_digest(path)
    except FileNotFoundError:
        raise
    except ValueError as error:
        raise ShardError(f"{error}; {_BUILD}") from error
    if not manifest.keys() >= KEYS:
        raise ShardError(f"{path}: not a manifest of this version; {_BUILD}")
    return manifest


def check_index_file(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ShardError if the file of an index is not the one that was written."""
    path, written = folder / "index.faiss", manifest["index"]
    if not path.is_file():
        raise ShardError(f"{path} does not exist; {_BUILD}")
    if path.stat().st_size != written["bytes"] or sha256_file(path) != written["sha256"]:
        raise ShardError(f"{path}: damaged (its SHA-256 is not the one that was written); {_BUILD}")


def indexes(corpus: Path) -> Sequence[str]:
    """Return the names of the indexes of an encoded corpus, sorted."""
    return sorted(path.parent.name for path in corpus.glob("indexes/*/manifest.json"))


def open_faiss_index(corpus: EncodedCorpus, name: str, parameters: str = "") -> FaissIndex:
    """Open an index of a corpus, verified, with FAISS's search parameters ("": those that its manifest chose).

    Raises FileNotFoundError if there is none of that name, ShardError if it is damaged, ValueError if it is of other
    vectors than the corpus has now, or has no such parameter.
    """
    folder, names = index_folder(corpus.folder, name), indexes(corpus.folder)
    if name not in names:
        has = f"it has {', '.join(names)}" if names else "jaxret index --workdir=... --factory=... builds one"
        raise FileNotFoundError(f"{corpus.folder} has no index {name!r}; {has}")
    require_one_query_vector(corpus)
    manifest = read_index_manifest(folder)
    if manifest["corpus"] != identity_of(corpus):
        was, now = manifest["corpus"]["passages"], corpus.corpus["passages"]
        raise ValueError(
            f"{folder} is an index of other vectors ({was:,} passages) than the corpus has now ({now:,}; appended, "
            f"deleted or encoded again): {_BUILD} --factory={manifest['factory']} --name={name}, or search "
            "exactly, without --index"
        )
    recall = manifest.get("recall")
    if recall is None:
        raise ValueError(f"{folder} was built, but its recall was not measured: run the same jaxret index again")
    state = file_state(folder / "index.faiss")
    check_index_file(folder, manifest)
    index = replace(load_faiss_index(folder, manifest), state=state)
    try:
        parse_parameters(index.index, parameters)
    except ValueError as error:
        raise ValueError(f"--index_parameters={error}") from error
    return replace(index, parameters=parameters or recall["parameters"], measured=recall)


def load_faiss_index(folder: Path, manifest: Mapping[str, Any]) -> FaissIndex:
    """Return the index of a folder, mapped into memory. Raises ShardError if FAISS cannot read it."""
    faiss, path = faiss_library(), folder / "index.faiss"
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ShardError(
            f"{path}: FAISS {faiss.__version__} cannot read an index of FAISS {manifest['made']['faiss']}; {_BUILD}"
        ) from error
    if (index.ntotal, index.d) != (manifest["vectors"], manifest["dimension"]):
        raise ShardError(
            f"{path}: {index.ntotal:,} vectors of {index.d} numbers, {manifest['vectors']:,} of "
            f"{manifest['dimension']} were written; {_BUILD}"
        )
    norm, state = manifest["largest_norm"], file_state(path)
    return FaissIndex(index, manifest["factory"], manifest["vectors_per_passage"], norm, file=path, state=state)
