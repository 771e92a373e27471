"""Questions -> run file and numbers, from a run and the shards it encoded."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.contract import require_equal
from jaxret.data.formats import corpus_file, files_of, source_path
from jaxret.data.records import Judgement, Passage, Query, Rankings
from jaxret.data.tokenizer import Truncation
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.retrieval.approximate import Chosen, Mapped, open_index
from jaxret.retrieval.backends import select_backend
from jaxret.retrieval.candidates import Proposer, compared, read_wanted
from jaxret.retrieval.encoded import EncodedCorpus, open_encoded
from jaxret.retrieval.kept import Kept, keep, vectors_of
from jaxret.retrieval.metadata import matching
from jaxret.retrieval.passages import Passages
from jaxret.retrieval.pieces import on_devices
from jaxret.retrieval.proof import SearchResult
from jaxret.retrieval.search import search
from jaxret.retrieval.self_check import self_check
from jaxret.retrieval.shards import ShardError, read_entry
from jaxret.runs.embedder import padded_length
from jaxret.runs.run import Run, config_of_task
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json
from jaxret.types import Ragged


@dataclass(frozen=True)
class Retrieved:
    """A ranking of passages for every query, and how it was found."""

    rankings: Rankings
    result: SearchResult
    shards: EncodedCorpus
    truncation: Truncation  # of the queries
    vectors: Ragged  # of the queries
    filters: tuple[str, ...] = ()
    approximate: Mapping[str, Any] | None = None  # how candidates were found; None: exact

    @property
    def corpus(self) -> dict[str, Any]:
        """{"sha256", "passages"}; after passages were appended or deleted, the digest is of what the corpus consists
        of."""
        return self.shards.corpus


def choose_corpus(run: Run, name: str = "") -> Path:
    """The folder of an encoded corpus, by its name or else by the folder or file that was encoded; without either, the
    only one there is. Raises FileNotFoundError, and ValueError where there are several."""
    return corpus_folder(run.workdir, name)


def corpus_folder(workdir: Workdir, name: str = "", flag: str = "--corpus") -> Path:
    """As `choose_corpus`, of a run that need not be opened. flag: what chooses one of several, for the error."""
    there = workdir.corpora
    if not there:
        config_of_task(workdir, "retrieval")  # of what is no retriever nothing can be encoded
        remedy = f"jaxret encode --workdir={workdir} --corpus=... first"
        raise FileNotFoundError(f"{workdir} has no encoded corpus; {remedy}")
    if name in there:
        return workdir.embeddings(name)
    found = [each for each in there if not name or is_place_of(encoded_from(workdir.embeddings(each)), name)]
    if len(found) > 1:
        several = f"several corpora{f' of {name}' if name else ''}, {', '.join(found)}"
        raise ValueError(f"{workdir} has {several}: choose one with {flag}")
    if not found and os.path.basename(name) == name and workdir.embeddings(name).is_dir():
        raise FileNotFoundError(f"{workdir.embeddings(name)} is not finished; wait for who encodes it, or encode again")
    if not found:
        raise FileNotFoundError(f"{workdir} has no corpus {name!r}; it has {', '.join(there)}")
    return workdir.embeddings(found[0])


def encoded_from(folder: Path) -> str:
    """The folder or file whose passages were encoded into `folder`, from the root; "" if that is not known."""
    path = (read_entry(folder / "corpus.json") or {}).get("path")
    return path if isinstance(path, str) else ""


def texts_of(encoded: EncodedCorpus) -> list[Path]:
    """The files that the texts of an encoded corpus are read from, as far as that is known. Raises DataError if a
    folder that was encoded has no corpus any more."""
    places = [encoded_from(shards.folder) for shards in encoded.shards]
    return [file for place in places if place for file in files_of(corpus_file(place))]


def is_place_of(encoded: str, name: str) -> bool:
    """Whether a name is the path of what was encoded, however it is spelt."""
    return bool(encoded) and os.path.realpath(source_path(encoded)) == os.path.realpath(source_path(name))


def open_corpus(run: Run, folder: Path) -> EncodedCorpus:
    """The shards in `folder`, of all parts. Raises ContractError if another model, or another checkpoint of it, encoded
    them; how long texts may be is each side's own. Raises ShardError if they do not say what they were made from."""
    corpus = open_encoded(folder)
    for shards in corpus.shards:
        made_by, name = shards.fingerprint, f"{shards.folder}/manifest.json"
        for part, keys in {"contract": (), "checkpoint": ("step", "digest"), "corpus": ("sha256", "passages")}.items():
            found = made_by.get(part)
            if not isinstance(found, dict) or not all(key in found for key in keys):
                raise ShardError(f"{name}: fingerprint.{part} is {found!r}; run encode again")
        remedy = (
            f"Encode the corpus with this checkpoint (jaxret encode --workdir={run.workdir} --name=...), "
            f"or search with --checkpoint={made_by['checkpoint']['step']}."
        )
        run.require_same_vectors(made_by["contract"], name, remedy)
        require_equal(
            {"checkpoint": made_by["checkpoint"]},
            {"checkpoint": run.checkpoint},
            name,
            f"the model in {run.workdir}",
            remedy,
        )
    return corpus


class Searcher:
    """A run and a corpus that it encoded, opened once for any number of searches: keeps the compiled programs, the
    shards (verified when it is opened) with the backend, and the index of the passages' texts."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        backend: str = "auto",
        filters: Sequence[str] = (),
        many: bool = False,
        precision: str = "float32",
        candidates: str = "",
        index: Chosen | None = None,
    ) -> None:
        """folder: as `choose_corpus` gives it. filters: FIELD:VALUE, what passages that are searched must have in their
        metadata (`metadata.py`). many: there will be many searches, so that vectors are held in memory if they are few
        enough, and on the devices if they fit there (`kept.py`). precision: in which candidates are found
        (`precision.py`); what is found is the same. candidates: FRONT:N, which are scored exactly, and others not
        (`candidates.py`). index: an approximate index that finds candidates (`approximate.py`): what it does not find
        is missing. Raises what `open_corpus`, `matching` and `open_index` raise, ValueError for a backend that there is
        not, where there is no passage to search and for several ways of finding candidates, and RuntimeError if the
        backend disagrees with a float64 product."""
        if candidates and index:
            raise ValueError(f"candidates are found by {candidates} or by the index {index.name}, not by both")
        if index and (backend, precision) != ("auto", "float32"):
            raise ValueError("--backend and --precision are of exact search: leave them or the index out")
        wanted = read_wanted(candidates) if candidates else None
        self.run = run
        self.folder = folder
        self.filters = tuple(filters)
        self.shards = open_corpus(run, folder)
        if index and filters:
            raise ValueError("--filter needs exact search: leave the index out, which was built of all passages")
        if filters:
            self.shards = self.shards.only(matching(self.shards, filters))
        if not self.shards.total_rows:
            why = f"none has {' '.join(filters)}" if filters else "all were deleted"
            raise ValueError(f"{folder} has no passage to search: {why}")
        self.backend = select_backend(backend, self.shards.ragged, precision)
        self.index = open_index(self.shards, index) if index else None
        self._corpus: Any = Mapped(self.shards) if index else self.shards
        if many and not index:
            self._corpus = keep(self.shards, on_devices(self.shards, self.backend))
        if isinstance(self._corpus, Kept):  # else blocks are loaded anew for every search
            self.backend = select_backend(backend, self.shards.ragged, precision, many=True)
        self_check(self.backend, self.shards.ragged)
        self.proposer: Proposer | None = None
        if wanted:
            front = select_backend(backend, precision=precision)
            self_check(front)
            self.proposer = Proposer.open(self._corpus, wanted, front, many)
        self.embedder = run.embedder()
        self._texts: list[Passages] = []  # of each part, the last one first

    def search(self, queries: Sequence[Query], k: int, progress: bool = False) -> Retrieved:
        """Encodes the queries and searches, exactly but for `candidates` and `index`; the k best passages of each, best
        first. Raises ValueError for k < 1 or no queries, and for more passages than `candidates` says."""
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if self.proposer:
            self.proposer.wanted.require(k)
        cut, vectors = self.encode(queries, progress)
        result, ids = self.nearest(vectors, k, progress)
        rankings = {
            query.id: [(passage, float(score)) for passage, score in zip(found, scores, strict=True)]
            for query, found, scores in zip(queries, ids, result.scores, strict=True)
        }
        return Retrieved(rankings, result, self.shards, cut, vectors, self.filters, self._approximate(k))

    def _approximate(self, k: int) -> dict[str, Any] | None:
        """How a search for k passages finds candidates, as results say it; None: so that nothing is missing."""
        if self.proposer:
            return {"candidates": str(self.proposer.wanted)}
        return {"index": self.index.described(k)} if self.index else None

    def encode(self, queries: Sequence[Query], progress: bool = False) -> tuple[Truncation, Ragged]:
        """The first half of a search: text to tokens to vectors. Raises ValueError for no queries."""
        if not queries:
            raise ValueError("there is no query to search for")
        cut = Truncation("queries", self.run.tokenizer.query_length)
        tokens = self.run.tokenizer.queries((query.text for query in queries), progress, cut)
        return cut, self.embedder(tokens, "query", progress)

    def nearest(self, vectors: Ragged, k: int, progress: bool = False) -> tuple[SearchResult, list[list[str]]]:
        """The second half: what is found for the vectors of each query, and the ids of these passages."""
        if self.proposer:
            result = self.proposer(vectors, self._corpus, k, progress)
        elif self.index:
            result = self.index.search(vectors, self._corpus, k)
        else:
            result = search(vectors, self._corpus, k, self.backend, progress)
        ids, width = self._corpus.ids(result.rows.reshape(-1)), result.rows.shape[1]
        return result, [ids[i * width : (i + 1) * width] for i in range(len(result.rows))]

    def compared(self, found: Retrieved) -> Retrieved:
        """With what an approximate search missed of some of its queries, which are searched exactly."""
        if not self.proposer:
            return found
        missed = compared(self.proposer.wanted, found.result, found.vectors, self._corpus, self.backend)
        return replace(found, approximate=missed)

    def warm_up(self, questions: Sequence[str], k: int) -> list[str]:
        """Compiles what questions of these lengths need when they are asked one at a time, and reads the vectors.
        Returns ids of passages, those that the first question found."""
        found: list[str] = []
        tokens = self.run.tokenizer.queries(questions)
        of_length = {padded_length(int(length)): row for row, length in enumerate(tokens.lengths)}
        late = self.run.retriever.late_interaction  # as many vectors as tokens: a program for each length, too
        for number, row in enumerate(of_length.values()):
            vectors = self.embedder(tokens.take(np.array([row])), "query")
            if late or number == 0:
                _, (ids,) = self.nearest(vectors, k)
                found = found or ids
        return found

    @property
    def description(self) -> str:
        """What finds the passages, in a line."""
        return (self.proposer or self.index or self.backend).description

    @property
    def where(self) -> str:
        """Where the vectors are for the next search: "memory"; "devices", alone; "disk", to be read; "mapped", of which
        an index needs a few."""
        if self.index:
            return "mapped"
        if not isinstance(self._corpus, Kept):
            return "disk"
        return "devices" if self._corpus.vectors is None else "memory"

    def winners(self, found: Retrieved) -> list[list[tuple[int, ...]]]:
        """For each passage of each ranking: which of its vectors has the highest product with each of the query's."""
        rows = found.result.rows
        if self.run.retriever.vectors_per_passage == 1:
            return [[(0,)] * rows.shape[1]] * len(rows)
        lists = iter(vectors_of(self._corpus, rows.reshape(-1)))
        return [
            [tuple((next(lists).astype(np.float64) @ query.T.astype(np.float64)).argmax(axis=0).tolist()) for _ in row]
            for query, row in zip(found.vectors, rows, strict=True)
        ]

    def scores(self, vectors: Ragged, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of each query, given as its vectors, with the passages in some rows: as search scores them, float64 rounded
        to float32."""
        every = sorted({row for found in rows for row in found})
        documents = dict(zip(every, vectors_of(self._corpus, np.array(every, np.int64)), strict=True))

        def score(query: np.ndarray, row: int) -> float:
            products = documents[row].astype(np.float64) @ query.T.astype(np.float64)  # [V,U]
            return float(np.float32(products.max(axis=0).sum()))

        return [[score(query, row) for row in found] for query, found in zip(vectors, rows, strict=True)]

    @property
    def bytes_read(self) -> int:
        """Of the corpus's files, by index, so far."""
        return sum(texts.bytes_read for texts in self._texts)

    def passages(self, ids: Collection[str]) -> dict[str, Passage]:
        """The passages of the shards with these ids; reads no others. Raises what opening `Passages` raises."""
        self._texts = self._texts or [Passages(shards.folder) for shards in reversed(self.shards.shards)]
        found: dict[str, Passage] = {}
        for texts in self._texts:  # an id that was deleted may have come again: the last one counts
            missing = [key for key in ids if key not in found]
            found |= texts.read(missing) if missing else {}
        return {key: found.get(key) or Passage(key, "") for key in ids}  # one without text was encoded under "keep"


def retrieve(
    run: Run, queries: Sequence[Query], folder: Path, k: int, backend: str = "auto", progress: bool = True
) -> Retrieved:
    """One search with a `Searcher` of its own."""
    return Searcher(run, folder, backend).search(queries, k, progress)


def evaluate_retrieved(retrieved: Retrieved, judgements: Sequence[Judgement], measures: Sequence[str]) -> Evaluation:
    """The measures over all judged queries; a query that was not searched for counts as zero."""
    return evaluate(retrieved.rankings, judgements, measures)


def provenance(run: Run, retrieved: Retrieved, k: int, **more: Any) -> dict[str, Any]:
    """What a number was measured on: written beside it."""
    return {
        "checkpoint": run.checkpoint,
        "config": read_json(run.workdir.config),
        "training_data": read_json(run.workdir.data),
        "environment": read_json(run.workdir.environment),
        "corpus": retrieved.corpus,
        "search": {
            "backend": retrieved.result.backend,
            "scored_exactly": retrieved.result.scored,  # (query, passage) pairs
            "k": k,
            "exact": retrieved.approximate is None,
            **(retrieved.approximate or {}),
            **({"filter": list(retrieved.filters)} if retrieved.filters else {}),
            "query_length": run.tokenizer.query_length,
            "passage_length": retrieved.shards.fingerprint["contract"].get("passage_length"),
        },
        **({"lineage": read_json(run.workdir.lineage)} if run.workdir.lineage.exists() else {}),
        **more,
    }
