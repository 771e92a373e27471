"""Approximate search, for who asks for it: an index of FAISS finds candidates among the vectors of an encoded corpus,
and these are scored and ordered exactly, as exact search does (`search.py`). What the index does not find is missing;
how much that is was measured when it was built (`approximate_build.py`), and stands in its manifest.

<corpus>/indexes/<name>/index.faiss    the index, FAISS's own format
                        manifest.json  written last: how it was built, of which vectors, its digest; what it finds
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxret import storage
from jaxret.retrieval.dense import QUERY_ROWS, SingleVectors
from jaxret.retrieval.encoded import EncodedCorpus
from jaxret.retrieval.factory import effort_of, faiss_library, set_effort
from jaxret.retrieval.proof import SearchResult
from jaxret.retrieval.search import Corpus, query_vectors, score_candidates
from jaxret.retrieval.shards import ShardError
from jaxret.runs.workdir import plain
from jaxret.storage import sha256_file, sha256_json
from jaxret.types import Ragged

KEYS = {"factory", "training", "corpus", "vectors", "dimension", "vectors_per_passage", "largest_norm", "made", "index"}
_BUILD = "build it again with jaxret index"


class Settings(NamedTuple):
    """How hard an index searches. effort: its nprobe or ef_search (0: it has neither)."""

    candidates: int  # vectors that the index returns for a question; their passages are scored exactly
    effort: int


@dataclass(frozen=True)
class Chosen:
    """What a search asks for: an index by its name, and settings other than those it keeps (0: these)."""

    name: str
    candidates: int = 0
    nprobe: int = 0
    ef_search: int = 0

    @property
    def label(self) -> str:
        """What results are called: those of other settings are other results."""
        asked = {"rescore": self.candidates, "nprobe": self.nprobe, "ef_search": self.ef_search}
        return "-".join([self.name, *(f"{name}{value}" for name, value in asked.items() if value)])


@dataclass(frozen=True)
class Approximate:
    """An index with the vectors of a corpus in it; vector v of row r has the number r * V + v."""

    index: Any  # FAISS's
    factory: str
    vectors_per_passage: int
    largest_norm: float  # of the vectors, an upper bound
    settings: Settings
    measured: dict[str, Any] | None = None  # what its manifest says of recall

    @property
    def description(self) -> str:
        """One line: library, version, index."""
        return f"FAISS {faiss_library().__version__}, {self.factory}"

    def used(self, k: int) -> Settings:
        """How hard a search for k passages searches at least: all of the k are candidates."""
        return self.settings._replace(candidates=max(k, self.settings.candidates))

    def described(self, k: int) -> dict[str, Any]:
        """What results of a search for k passages say of it."""
        name, _ = effort_of(self.index)
        effort = {name: self.settings.effort} if name else {}
        return {"factory": self.factory, **effort, "candidates": self.used(k).candidates, "recall": self.recall(k)}

    def recall(self, k: int) -> dict[str, float] | None:
        """Recall at each depth that was measured, with the settings of a search for k passages; None if it was not."""
        for row in (self.measured or {}).get("measured", []):
            if Settings(row["candidates"], row["effort"]) == self.used(k):
                return dict(row["recall"])
        return None

    def told(self, k: int) -> str:
        """What a search for k passages says of it, in a line."""
        name, _ = effort_of(self.index)
        effort = f"{name} {self.settings.effort}, " if name else ""
        how = f"{self.factory}, {effort}{self.used(k).candidates:,} candidates scored exactly"
        if (recall := self.recall(k)) is None:
            return f"{how}; its recall with these settings was not measured"
        found = ", ".join(f"@{depth} {value:.3f}" for depth, value in recall.items())
        asked = (self.measured or {})["questions"]
        return f"{how}; recall of exact search {found}, measured with {asked['count']:,} {asked['source']}"

    def search(self, queries: np.ndarray | Ragged, corpus: Corpus, k: int) -> SearchResult:
        """The best k passages among the candidates of each query [Q,D] float32, with the scores and in the order of
        exact search; fewer only where the corpus has fewer. Raises ValueError for what exact search refuses, and where
        no setting finds so many."""
        asked, wanted = query_vectors(queries, corpus), min(k, corpus.total_rows)
        assert isinstance(asked, SingleVectors), "there are no indexes of lists"
        rows = self._candidates(asked.vectors, wanted)
        scored = score_candidates(asked, rows, corpus, wanted, self.largest_norm)
        return SearchResult(*scored, self.description, (len(asked),), int((rows >= 0).sum()))

    def _candidates(self, queries: np.ndarray, wanted: int) -> np.ndarray:
        """At least `wanted` rows for each query, int64 [Q,C], -1 where there are no more. Where an index gives fewer
        (few lists were looked at, or many vectors are of the same passages), it looks twice as hard."""
        _, most = effort_of(self.index)
        depth, effort = self.used(wanted)
        found: list[np.ndarray] = [np.empty(0, np.int64)] * len(queries)
        todo = np.arange(len(queries))
        while True:
            depth = min(depth, self.index.ntotal)
            set_effort(self.index, effort)
            short = []
            for start in range(0, len(todo), QUERY_ROWS):
                part = todo[start : start + QUERY_ROWS]
                for query, rows in zip(part, self._rows(queries[part], depth), strict=True):
                    found[query] = rows
                    short += [int(query)] * (len(rows) < wanted)
            if not short:
                break
            if depth == self.index.ntotal and effort >= most:
                raise ValueError(
                    f"the index {self.factory} reaches {len(found[short[0]]):,} passages for query {short[0]}, "
                    f"{wanted:,} were asked for: ask for fewer, or leave the index out (exact search has them)"
                )
            todo, depth, effort = np.array(short), 2 * depth, min(2 * effort, most)
        width = max((len(rows) for rows in found), default=0)
        return np.stack([np.append(rows, np.full(width - len(rows), -1, np.int64)) for rows in found])

    def _rows(self, queries: np.ndarray, depth: int) -> Iterator[np.ndarray]:
        """Of each query: the rows whose vectors the index gives, each once."""
        _, vectors = self.index.search(queries, depth)
        for numbers in vectors:
            yield np.unique(numbers[numbers >= 0] // self.vectors_per_passage)


class Mapped:
    """A corpus whose shards are mapped into memory once for many searches, each of which reads a few rows."""

    def __init__(self, corpus: EncodedCorpus) -> None:
        self.total_rows, self.dimension, self.ragged = corpus.total_rows, corpus.dimension, corpus.ragged
        self.describe, self.ids = corpus.describe, corpus.ids
        self._shards = list(corpus)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(self._shards)


def index_folder(corpus: Path, name: str) -> Path:
    """The folder of an index of an encoded corpus. Raises ValueError for a name that is no plain name."""
    return corpus / "indexes" / plain("the name of an index", name)


def identity_of(corpus: EncodedCorpus) -> dict[str, Any]:
    """What an index is of: the texts that are there, and the digests of all vectors."""
    digests = [[entry["vectors"]["sha256"] for entry in part.manifest.shards] for part in corpus.shards]
    return {**corpus.corpus, "vectors": sha256_json(digests)}


def require_one_query_vector(corpus: EncodedCorpus) -> int:
    """V. Raises ValueError where every passage has a list of vectors of its own."""
    if corpus.ragged:
        raise ValueError(
            f"{corpus.folder} has another number of vectors for each passage (as under late interaction): there are no "
            "approximate indexes of these; search exactly"
        )
    return corpus.shards[0].vectors_per_row


def read_index_manifest(folder: Path) -> dict[str, Any]:
    """What is written of an index. Raises FileNotFoundError, and ShardError if it is not what was written."""
    path = folder / "manifest.json"
    try:
        found = storage.read_sealed(path)
    except FileNotFoundError:
        raise
    except ValueError as error:
        raise ShardError(f"{error}; {_BUILD}") from error
    if not found.keys() >= KEYS:
        raise ShardError(f"{path}: not a manifest of this version; {_BUILD}")
    return found


def check_index_file(folder: Path, manifest: dict[str, Any]) -> Path:
    """The file of an index. Raises ShardError if it is not the one that was written."""
    path, written = folder / "index.faiss", manifest["index"]
    if not path.is_file():
        raise ShardError(f"{path} does not exist; {_BUILD}")
    if path.stat().st_size != written["bytes"] or sha256_file(path) != written["sha256"]:
        raise ShardError(f"{path}: damaged (its SHA-256 is not the one that was written); {_BUILD}")
    return path


def indexes(corpus: Path) -> Sequence[str]:
    """The names of the indexes of an encoded corpus, sorted."""
    return sorted(path.parent.name for path in corpus.glob("indexes/*/manifest.json"))


def open_index(corpus: EncodedCorpus, chosen: Chosen) -> Approximate:
    """An index of a corpus, verified. Raises FileNotFoundError if there is none of that name, ShardError if it is
    damaged, ValueError if it is of other vectors than the corpus has now, or has no such setting."""
    folder, there = index_folder(corpus.folder, chosen.name), indexes(corpus.folder)
    if chosen.name not in there:
        has = f"it has {', '.join(there)}" if there else "jaxret index --workdir=... --factory=... builds one"
        raise FileNotFoundError(f"{corpus.folder} has no index {chosen.name!r}; {has}")
    require_one_query_vector(corpus)
    manifest = read_index_manifest(folder)
    if manifest["corpus"] != identity_of(corpus):
        was, now = manifest["corpus"]["passages"], corpus.corpus["passages"]
        raise ValueError(
            f"{folder} is an index of other vectors ({was:,} passages) than the corpus has now ({now:,}; appended, "
            f"deleted or encoded again): {_BUILD} --factory={manifest['factory']} --name={chosen.name}, or search "
            "exactly, without --index"
        )
    recall = manifest.get("recall")
    if recall is None:
        raise ValueError(f"{folder} was built, but its recall was not measured: run the same jaxret index again")
    index = load(check_index_file(folder, manifest), manifest)
    kept = Settings(**recall["chosen"])
    made = Approximate(
        index, manifest["factory"], manifest["vectors_per_passage"], manifest["largest_norm"], kept, recall
    )
    return replace(made, settings=_asked_for(index, chosen, kept, manifest["factory"]))


def load(path: Path, manifest: dict[str, Any]) -> Any:
    """FAISS's index in a file whose digest was compared, mapped into memory. Raises ShardError if it is no such."""
    faiss = faiss_library()
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ShardError(
            f"{path}: FAISS {faiss.__version__} cannot read what FAISS {manifest['made']['faiss']} wrote; {_BUILD}"
        ) from error
    if (index.ntotal, index.d) != (manifest["vectors"], manifest["dimension"]):
        raise ShardError(
            f"{path}: {index.ntotal:,} vectors of {index.d} numbers, {manifest['vectors']:,} of "
            f"{manifest['dimension']} were written; {_BUILD}"
        )
    return index


def _asked_for(index: Any, chosen: Chosen, kept: Settings, factory: str) -> Settings:
    name, most = effort_of(index)
    given = {"nprobe": chosen.nprobe, "ef_search": chosen.ef_search}
    for flag, value in given.items():
        if value and flag != name:
            own = f"it has {name}" if name else "it looks at all vectors"
            raise ValueError(f"--{flag}={value}: the index {factory} has no {flag}; {own}")
    effort = given.get(name, 0) or kept.effort
    if name == "nprobe" and effort > most:
        raise ValueError(f"--nprobe={effort}: the index {factory} has {most} lists; at most {most} can be looked at")
    return Settings(chosen.candidates or kept.candidates, effort)
