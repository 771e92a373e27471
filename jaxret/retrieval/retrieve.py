"""Questions -> run file and numbers, from a run and the shards it encoded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.contract import require_equal
from jaxret.data.records import Judgement, Passage, Query, Rankings
from jaxret.data.tokenizer import Truncation
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.retrieval.backends import select_backend
from jaxret.retrieval.kept import keep, vectors_of
from jaxret.retrieval.passages import Passages
from jaxret.retrieval.proof import SearchResult
from jaxret.retrieval.search import search
from jaxret.retrieval.self_check import self_check
from jaxret.retrieval.shard_set import ShardSet, open_shards
from jaxret.retrieval.shards import ShardError
from jaxret.runs.run import Run
from jaxret.storage import read_json
from jaxret.types import Ragged


@dataclass(frozen=True)
class Retrieved:
    """A ranking of passages for every query, and how it was found."""

    rankings: Rankings
    result: SearchResult
    shards: ShardSet
    truncation: Truncation  # of the queries
    vectors: Ragged  # of the queries

    @property
    def corpus(self) -> dict[str, Any]:
        """{"sha256", "passages"}."""
        return self.shards.manifest.fingerprint["corpus"]


def choose_corpus(run: Run, name: str = "") -> Path:
    """The folder of an encoded corpus; without a name, the only one there is. Raises FileNotFoundError."""
    there = run.workdir.corpora
    if not there:
        remedy = f"jaxret encode --workdir={run.workdir} --corpus=... first"
        raise FileNotFoundError(f"{run.workdir} has no encoded corpus; {remedy}")
    if not name and len(there) > 1:
        raise ValueError(f"{run.workdir} has several corpora, {', '.join(there)}: choose one with --corpus")
    if name and name not in there:
        raise FileNotFoundError(f"{run.workdir} has no corpus {name!r}; it has {', '.join(there)}")
    return run.workdir.embeddings(name or there[0])


def open_corpus(run: Run, folder: Path) -> ShardSet:
    """The shards in `folder`. Raises ContractError if another model, or another checkpoint of it, encoded them; how
    long texts may be is each side's own. Raises ShardError if they do not say what they were made from."""
    shards = open_shards(folder)
    made_by = shards.manifest.fingerprint
    for name, keys in {"contract": (), "checkpoint": ("step", "digest"), "corpus": ("sha256", "passages")}.items():
        part = made_by.get(name)
        if not isinstance(part, dict) or not all(key in part for key in keys):
            raise ShardError(f"{folder}/manifest.json: fingerprint.{name} is {part!r}; run encode again")
    remedy = (
        f"Encode the corpus with this checkpoint (jaxret encode --workdir={run.workdir} --name=...), "
        f"or search with --checkpoint={made_by['checkpoint']['step']}."
    )
    name = f"{folder}/manifest.json"
    run.require_same_vectors(made_by["contract"], name, remedy)
    require_equal(
        {"checkpoint": made_by["checkpoint"]},
        {"checkpoint": run.checkpoint},
        name,
        f"the model in {run.workdir}",
        remedy,
    )
    return shards


class Searcher:
    """A run and a corpus that it encoded, opened once for any number of searches: keeps the compiled programs, the
    shards (verified when it is opened) with the backend, and the index of the passages' texts."""

    def __init__(self, run: Run, folder: Path, backend: str = "auto") -> None:
        """folder: as `choose_corpus` gives it. Raises what `open_corpus` raises, ValueError for a backend that there is
        not, and RuntimeError if it disagrees with a float64 product."""
        self.run = run
        self.folder = folder
        self.shards = open_corpus(run, folder)
        self._corpus = keep(self.shards)
        self.backend = select_backend(backend, self.shards.ragged)
        self_check(self.backend, self.shards.ragged)
        self.embedder = run.embedder()
        self._texts: Passages | None = None

    def search(self, queries: Sequence[Query], k: int, progress: bool = False) -> Retrieved:
        """Encodes the queries and searches exactly; the k best passages of each, best first. Raises ValueError for
        k < 1 or no queries."""
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if not queries:
            raise ValueError("there is no query to search for")
        cut = Truncation("queries", self.run.tokenizer.query_length)
        tokens = self.run.tokenizer.queries((query.text for query in queries), progress, cut)
        vectors = self.embedder(tokens, "query", progress)
        result = search(vectors, self._corpus, k, self.backend, progress)
        ids = self._corpus.ids(result.rows.reshape(-1))
        width = result.rows.shape[1]
        rankings = {
            query.id: [
                (passage, float(score))
                for passage, score in zip(ids[i * width : (i + 1) * width], result.scores[i], strict=True)
            ]
            for i, query in enumerate(queries)
        }
        return Retrieved(rankings, result, self.shards, cut, vectors)

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

    @property
    def bytes_read(self) -> int:
        """Of the corpus's file, by index, so far."""
        return self._texts.bytes_read if self._texts else 0

    def passages(self, ids: Collection[str]) -> dict[str, Passage]:
        """The passages of the shards with these ids; reads no others. Raises what opening `Passages` raises."""
        self._texts = self._texts or Passages(self.folder)
        found = self._texts.read(ids)
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
            "k": k,
            "exact": True,
            "query_length": run.tokenizer.query_length,
            "passage_length": retrieved.shards.fingerprint["contract"].get("passage_length"),
        },
        **more,
    }
