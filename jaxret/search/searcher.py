"""Open a run and a corpus that it encoded, and search it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.chunks import document_id
from jaxret.data.records import Passage, Query, Rankings
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.index.encoded_corpus import EncodedCorpus, corpus_version, open_encoded
from jaxret.index.metadata_filters import matching_rows
from jaxret.index.shards import ShardError
from jaxret.parallel.forks import require_unforked
from jaxret.runs.embedder import padded_length
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import Run
from jaxret.search.documents import best_documents
from jaxret.search.passage_texts import PassageTexts
from jaxret.search.passage_vectors import PassageVectors
from jaxret.search.proof import SearchResult
from jaxret.search.search_options import SearchOptions
from jaxret.search.vectors.process_group import ProcessGroup
from jaxret.storage.atomic import sha256_json
from jaxret.types import Ragged, TextVectors


@dataclass(frozen=True)
class SearchOutcome:
    """A ranking of passages for every query, and how it was computed."""

    rankings: Rankings
    result: SearchResult
    encoded_corpus: EncodedCorpus
    truncation: Truncation  # truncation of the queries
    vectors: TextVectors  # query vectors
    filters: tuple[str, ...] = ()
    max_passage: bool = False  # whether documents are ranked
    approximate: Mapping[str, Any] | None = None  # description of an approximate search; None: exact search

    def to_json(self, run: Run, k: int) -> dict[str, Any]:
        """Return the settings of the search as JSON for a file of results.

        `run` is the run that encoded queries and corpus; `k` is the number of passages of a query.
        """
        size, manifest = self.encoded_corpus.dimension, self.encoded_corpus.shards[0].manifest
        words = self.encoded_corpus.fingerprint.get("encode", {}).get("words", 0)
        return {
            "backend": self.result.backend,
            "scored_exactly": self.result.scored_pairs,  # (query, passage) pairs
            "k": k,
            "exact": self.approximate is None,
            **(self.approximate or {}),
            **({"filter": list(self.filters)} if self.filters else {}),
            **({"max_passage": True} if self.max_passage else {}),
            **({"dimension": size} if size != run.model.uncut.dimension else {}),
            "dtype": manifest.dtype,  # dtype of the vectors on disk
            **({"words": words} if manifest.layout == "sparse" else {}),  # largest number of words per passage; 0: all
            "query_length": run.tokenizer.query_length,
            "passage_length": self.encoded_corpus.fingerprint["contract"].get("passage_length"),
        }


def open_encoded_by(run: Run, folder: Path, only: tuple[int, int] = (0, 1)) -> EncodedCorpus:
    """Open the encoded corpus in a folder; `only` is the range of shards whose vectors are checked (`open_encoded`).

    Raises ContractError if another model or another checkpoint encoded it (text lengths and dimensions may differ), and
    ShardError if the shards do not record model, checkpoint and corpus.
    """
    encoded_corpus = open_encoded(folder, only=only)
    for shards in encoded_corpus.shards:
        fingerprint, name = shards.fingerprint, f"{shards.folder}/manifest.json"
        for part, keys in {"contract": (), "checkpoint": ("step", "digest"), "corpus": ("sha256", "passages")}.items():
            entry = fingerprint.get(part)
            if not isinstance(entry, dict) or not all(key in entry for key in keys):
                raise ShardError(f"{name}: fingerprint.{part} is {entry!r}; run encode again")
        remedy = (
            f"Encode the corpus with this checkpoint (jaxret encode --workdir={run.workdir} --name=...), "
            f"or search with --checkpoint={fingerprint['checkpoint']['step']}."
        )
        run.require_same_vectors(fingerprint["contract"], name, remedy)
        require_equal(
            {"checkpoint": fingerprint["checkpoint"]},
            {"checkpoint": run.checkpoint},
            name,
            f"the model in {run.workdir}",
            remedy,
        )
    return encoded_corpus


class Searcher:
    """A run and a corpus that it encoded, opened for any number of searches.

    It holds the compiled programs, the verified shards, the backend, and the index of the passages' texts.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        options: SearchOptions = SearchOptions(),
        many: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        """Open a corpus.

        Args:
            run: the run that encoded the corpus.
            folder: folder of the encoded corpus (`corpus_folder`).
            options: the options of the search.
            many: whether there will be many searches; then vectors stay in memory or on the devices if they fit
                (`in_memory.py`).
            group: the processes that search together; None: the processes that `options` selects.

        Raises:
            ValueError: the backend does not exist, or there is no passage to search.
            RuntimeError: the backend's scores differ from float64 products, or this is a forked process.

        It also raises the errors of `open_encoded_by`, `matching_rows` and `open_faiss_index`.
        """
        require_unforked()
        self.run, self.folder, self.filters, self.max_passage = run, folder, options.filters, options.max_passage
        self.group = group or (ProcessGroup.of_job() if options.all_processes else ProcessGroup())
        self._version = corpus_version(folder)  # read first, so that later changes are noticed
        digests = {"the corpus": self._version, "the checkpoint": run.checkpoint}
        # These values must be the same in all processes that search together.
        self.settings = {**asdict(replace(options, workers=None)), **digests}
        self.group.require_same(self.settings)
        self.encoded_corpus = self.group.agree_on(
            lambda: open_encoded_by(run, folder, (self.group.number, self.group.count))
        )
        if options.dimension or self.encoded_corpus.dimension != run.model.dimension:
            self._cut(options.dimension or self.encoded_corpus.dimension)
        if self.filters:
            self.group.agree_on(lambda: matching_rows(self.encoded_corpus, self.filters) if self.group.leads else None)
            self.encoded_corpus = self.group.agree_on(
                lambda: self.encoded_corpus.select(matching_rows(self.encoded_corpus, self.filters))
            )
        if not self.encoded_corpus.total_rows:
            reason = f"none has {' '.join(self.filters)}" if self.filters else "all were deleted"
            raise ValueError(f"{folder} has no passage to search: {reason}")
        self.vectors = self.group.agree_on(lambda: self._open_vectors(options, many))
        self.embedder = self.run.embedder()
        self.texts = PassageTexts(self.encoded_corpus, self.max_passage)

    def _open_vectors(self, options: SearchOptions, many: bool) -> PassageVectors:
        """Load the vectors that this process searches. A searcher with workers overrides this method."""
        corpus, first_row = self.encoded_corpus, 0
        if self.group.count != 1:
            first_row, corpus = corpus.in_range(self.group.number, self.group.count)
        return PassageVectors.open(corpus, first_row, options, many)

    def _cut(self, size: int) -> None:
        """Cut the vectors of passages and queries to the first `size` dimensions."""
        self.encoded_corpus = self.encoded_corpus.with_dimension(size, self.run.model.module.normalize)
        self.run = self.run.with_dimension(size)

    def is_stale(self) -> bool:
        """Return whether passages were appended, deleted or encoded again since the corpus was opened."""
        return corpus_version(self.folder) != self._version

    def search(self, queries: Sequence[Query], k: int, progress: bool = False) -> SearchOutcome:
        """Encode queries, and return the k best passages of each, best first.

        The search is exact unless the options have `candidates` or `index`. With several processes, only the first
        returns rankings.

        Raises ValueError for k < 1, no queries, and k above the number of candidates.
        """
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if self.vectors.generator:
            self.vectors.generator.spec.require(k)
        self.group.require_same({"k": k, "the queries": sha256_json([query.to_json() for query in queries])})
        cut, vectors = self.encode(queries, progress)
        result, ids = self.nearest(vectors, k, progress)
        rankings = {
            query.id: [(passage, float(score)) for passage, score in zip(row_ids, scores, strict=True)]
            for query, row_ids, scores in zip(queries, ids, result.scores)
        }
        approximate = self.vectors.describe_approximation(k)
        return SearchOutcome(
            rankings, result, self.encoded_corpus, cut, vectors, self.filters, self.max_passage, approximate
        )

    def first(self, passages: int) -> Searcher:
        """Return a searcher of the first passages only, in memory if they fit. Raises the errors of `require_first`."""
        self.require_first(passages)
        return self._part(self.encoded_corpus.select_first(passages))

    def _part(self, encoded_corpus: EncodedCorpus) -> Searcher:
        part = copy.copy(self)
        part.encoded_corpus = encoded_corpus
        part.texts = replace(self.texts, encoded_corpus=encoded_corpus)
        part.vectors = self.vectors.part(encoded_corpus)
        return part

    def among(self, rows: np.ndarray) -> Searcher:
        """Return a searcher of some rows only (`matching_rows`), in memory if they fit. It shares all other parts.

        Raises ValueError for an approximate search, and if none of the rows is searched, as all were deleted.
        """
        self._require_parts()
        encoded_corpus = self.encoded_corpus.select(rows)
        if not encoded_corpus.total_rows:
            raise ValueError("no passage matches the filter")
        return self._part(encoded_corpus)

    def require_first(self, passages: int) -> None:
        """Raise ValueError for an approximate search, and for more passages than the corpus has."""
        self._require_parts()
        if not 1 <= passages <= self.encoded_corpus.total_rows:
            raise ValueError(
                f"the first {passages:,} passages cannot be searched: {self.folder} has "
                f"{self.encoded_corpus.total_rows:,}"
            )

    def _require_parts(self) -> None:
        if not self.vectors.is_exact():
            raise ValueError("a part of a corpus is searched exactly; remove candidates and index")
        if self.group.count != 1:
            raise ValueError("a part of a corpus is searched in one process; remove coordinator and engine")

    def encode(self, queries: Sequence[Query], progress: bool = False) -> tuple[Truncation, TextVectors]:
        """Return the truncation and the vectors of queries. Raises ValueError if there is no query."""
        if not queries:
            raise ValueError("there is no query to search for")
        cut = Truncation("queries", self.run.tokenizer.query_length)

        def embed() -> TextVectors:
            return self._embed(self.run.tokenizer.queries(queries, progress, cut), progress)

        return cut, self.group.vectors_of_first(embed, self.encoded_corpus.sparse, self.encoded_corpus.dimension)

    def _embed(self, tokens: Ragged, progress: bool) -> TextVectors:
        return self.embedder(tokens, "query", progress)

    def nearest(self, vectors: TextVectors, k: int, progress: bool = False) -> tuple[SearchResult, list[list[str]]]:
        """Return the best passages for the vectors of each query, and their ids.

        With `max_passage`, the passages are the best ones of the best documents, and the ids are the documents' ids.
        With several processes, only the first returns ids.
        """
        corpus = self.vectors.loaded_corpus if self.group.count == 1 else self.encoded_corpus
        if self.max_passage:
            search_rows = functools.partial(self._search_rows, progress=progress)
            result = best_documents(
                search_rows,
                lambda rows: self.group.agree_on(lambda: corpus.ids(rows)),
                vectors,
                k,
                self.encoded_corpus.total_rows,
            )
        else:
            result = self._search_rows(vectors, k, progress)
        ids = self.group.agree_on(lambda: corpus.ids(result.rows.reshape(-1)) if self.group.leads else [])
        if self.max_passage:
            ids = [document_id(key) for key in ids]
        width = result.rows.shape[1]
        return result, [ids[i * width : (i + 1) * width] for i in range(len(result.rows) if self.group.leads else 0)]

    def _search_rows(self, vectors: TextVectors, k: int, progress: bool = False) -> SearchResult:
        """Return the best passages of all processes for the vectors of each query."""
        local_result = self.group.agree_on(lambda: self.vectors.search(vectors, k, progress))
        return self.group.merge(local_result, min(k, self.encoded_corpus.total_rows))

    def with_recall(self, outcome: SearchOutcome) -> SearchOutcome:
        """Return the outcome with the recall of an approximate search. To measure it, some queries are also searched
        exactly."""
        recall = self.vectors.measure_recall(outcome.vectors, outcome.result)
        return replace(outcome, approximate=recall) if recall else outcome

    def warm_up(self, queries: Sequence[Query], k: int) -> list[str]:
        """Compile the programs for single queries of these lengths, and read the vectors.

        Returns:
            The ids of the best passages of one query.
        """
        first_ids: list[str] = []
        tokens = self.run.tokenizer.queries(queries)
        row_of_length = {padded_length(int(length)): row for row, length in enumerate(tokens.lengths)}
        late_interaction = self.run.model.late_interaction  # each length has its own search program, too
        for number, row in enumerate(row_of_length.values()):
            vectors = self.embedder(tokens.take(np.array([row])), "query")
            if late_interaction or number == 0:
                _, (ids,) = self.nearest(vectors, k)
                first_ids = first_ids or ids
        return first_ids

    def best_vectors(self, outcome: SearchOutcome) -> list[list[tuple[int, ...]]]:
        """Return, for each passage of each ranking, the index of its best vector for each query vector."""
        rows = outcome.result.rows
        if self.run.model.vectors_per_passage == 1:
            return [[(0,)] * rows.shape[1]] * len(rows)
        return self.vectors.best_vectors(outcome.vectors, rows)

    def scores(self, vectors: TextVectors, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the scores of each query with the passages in its rows, computed in float64, rounded to float32."""
        return self.vectors.scores(vectors, rows)

    def best_passage(self, question: str, key: str) -> Passage:
        """Return the passage with an id that exists; with `max_passage` and a question, the document's best passage."""
        if not self.max_passage or not question:
            return self.texts.read({key})[key]
        rows = [
            row
            for first, ids in self.encoded_corpus.id_blocks()
            for row, passage_id in enumerate(ids, first)
            if document_id(passage_id) == key
        ]
        (scores,) = self.scores(self.encode([Query("0", question)])[1], [rows])
        return self.texts.of_rows(np.array([rows[int(np.argmax(scores))]]))[0]
