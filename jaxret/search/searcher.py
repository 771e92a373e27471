"""Open a run and a corpus that it encoded, and search it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxret.data.chunks import document_id
from jaxret.data.records import Passage, Query, Rankings
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.index.encoded_corpus import EncodedCorpus, corpus_version, open_encoded
from jaxret.index.metadata import matching_rows
from jaxret.index.passages import Passages
from jaxret.index.shards import ShardError
from jaxret.index.source import encoded_source, open_source
from jaxret.parallel.forks import require_unforked
from jaxret.runs.embedder import padded_length
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import Run
from jaxret.search.approximate.candidates import CandidateGenerator, compare_with_exact
from jaxret.search.approximate.faiss_index import FaissIndex, MappedCorpus, open_faiss_index
from jaxret.search.approximate.index_files import require_index
from jaxret.search.backends.select import select_backend, with_many_searches
from jaxret.search.documents import best_documents, join_passages
from jaxret.search.exact import search
from jaxret.search.in_memory import InMemoryCorpus, hold_in_memory, vectors_of
from jaxret.search.process_group import ProcessGroup
from jaxret.search.proof import SearchResult, no_result
from jaxret.search.search_options import SearchOptions
from jaxret.search.self_check import self_check
from jaxret.search.streaming import fits_devices
from jaxret.storage.atomic import sha256_json
from jaxret.types import Ragged, SparseRows, TextVectors

if TYPE_CHECKING:
    from jaxret.search.approximate.seismic_index import SeismicIndex
    from jaxret.search.inverted_lists import InvertedLists


@dataclass(frozen=True)
class SearchOutcome:
    """A ranking of passages for every query, and how it was computed."""

    rankings: Rankings
    result: SearchResult
    encoded_corpus: EncodedCorpus
    truncation: Truncation  # of the queries
    vectors: TextVectors  # of the queries
    filters: tuple[str, ...] = ()
    max_passage: bool = False  # the rankings are of documents
    approximate: Mapping[str, Any] | None = None  # how candidates were found; None: exact

    def to_json(self, run: Run, k: int) -> dict[str, Any]:
        """Return how the search was done, as JSON for a file of results.

        Args:
            run: the run that was searched by.
            k: passages for each query.
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
            "dtype": manifest.dtype,  # of the vectors on disk
            **({"words": words} if manifest.layout == "sparse" else {}),  # of a passage, at most; 0: all
            "query_length": run.tokenizer.query_length,
            "passage_length": self.encoded_corpus.fingerprint["contract"].get("passage_length"),
        }


def text_files(encoded_corpus: EncodedCorpus) -> list[Path]:
    """Return the files that the texts of an encoded corpus are read from, as far as they are known. Raises DataError if
    a folder that was encoded has no corpus any more."""
    sources = [encoded_source(shards.folder) for shards in encoded_corpus.shards]
    return [file for source in sources if source for file in open_source(source).files]


def open_encoded_by(run: Run, folder: Path, only: tuple[int, int] = (0, 1)) -> EncodedCorpus:
    """Open the shards in `folder`, of all parts; `only`: the range whose vectors are checked (`open_encoded`).

    Raises ContractError if another model, or another checkpoint of it, encoded them (lengths of texts and vectors may
    differ), and ShardError if the shards do not record what they were made from.
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


def require_options(run: Run, folder: Path, options: SearchOptions) -> None:
    """Raise for options by which no corpus of a run's vectors can be searched in `folder`, which need not exist yet.

    Filters and parameters of an index are not checked. Raises ValueError, and FileNotFoundError for an index that the
    folder has not.
    """
    run.with_dimension(options.dimension)
    if options.index:
        require_index(folder, options.index)
    if run.model.sparse:
        _require_lists(folder, options)
        # scipy takes a second, which dense vectors need not wait.
        from jaxret.search.inverted_lists import sparse_backend

        sparse_backend(options.backend)
        return
    select_backend(options.backend, run.model.vectors_per_passage is None, options.precision)
    if options.candidate_spec:
        options.candidate_spec.require_several(run.model.vectors_per_passage)


def _require_lists(folder: Path, options: SearchOptions) -> None:
    """Raise ValueError for options that inverted lists have not."""
    reason = f"the vectors in {folder} are weights of words, which inverted lists search"
    replace(options, backend="auto", index="", index_parameters="").require_plain(reason)


class Searcher:
    """A run and a corpus that it encoded, opened once for any number of searches.

    It keeps the compiled programs, the shards (verified when it is opened) with the backend, and the index of the
    passages' texts.
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
            run: the run that encoded it.
            folder: folder of the encoded corpus (`corpus_folder`).
            many: there will be many searches: vectors stay in memory if they are few enough, and on the devices if they
                fit there (`in_memory.py`).
            group: this process among those that search together; None: what `options` says.

        Raises:
            ValueError: a backend that does not exist, or no passage to search.
            RuntimeError: the backend disagrees with a float64 product, or this is a forked process.

        It raises what `open_encoded_by`, `matching_rows` and `open_faiss_index` raise, too.
        """
        require_unforked()
        self.run, self.folder, self.filters, self.max_passage = run, folder, options.filters, options.max_passage
        self.group = group or (ProcessGroup.of_job() if options.all_processes else ProcessGroup())
        self._version = corpus_version(folder)  # before anything is read
        digests = {"the corpus": self._version, "the checkpoint": run.checkpoint}
        self.settings = {**asdict(replace(options, workers=None)), **digests}  # alike in all that search together
        self.group.require_same(self.settings)
        self.encoded_corpus = self.group.agreed(
            lambda: open_encoded_by(run, folder, (self.group.number, self.group.count))
        )
        if options.dimension or self.encoded_corpus.dimension != run.model.dimension:
            self._cut(options.dimension or self.encoded_corpus.dimension)
        if self.filters:
            self.group.agreed(lambda: matching_rows(self.encoded_corpus, self.filters) if self.group.leads else None)
            self.encoded_corpus = self.group.agreed(
                lambda: self.encoded_corpus.select(matching_rows(self.encoded_corpus, self.filters))
            )
        if not self.encoded_corpus.total_rows:
            why = f"none has {' '.join(self.filters)}" if self.filters else "all were deleted"
            raise ValueError(f"{folder} has no passage to search: {why}")
        self.lists: InvertedLists | None = None
        self.generator: CandidateGenerator | None = None
        self.index: FaissIndex | SeismicIndex | None = None
        # The rows that this process searches, and how many there are before them: all, or those of a range of shards.
        self.first_row, self._own = 0, self.encoded_corpus
        if self.group.count != 1:
            self.first_row, self._own = self.encoded_corpus.in_range(self.group.number, self.group.count)
        self._corpus: Any = self._own
        self.group.agreed(lambda: self._open_vectors(options, many))
        self.embedder = self.run.embedder()
        self._texts: list[Passages] = []  # of each part, the last one first

    def _open_vectors(self, options: SearchOptions, many: bool) -> None:
        if self.encoded_corpus.sparse:
            self._open_sparse(options, many)
        else:
            self._open_dense(options, many)

    def _cut(self, size: int) -> None:
        """Search the first `size` numbers of vectors: of those that are stored, and of queries'."""
        self.encoded_corpus = self.encoded_corpus.with_dimension(size, self.run.model.module.normalize)
        self.run = self.run.with_dimension(size)

    def _open_sparse(self, options: SearchOptions, many: bool) -> None:
        """Load the lists, or the index, of a corpus of sparse vectors; see `__init__`."""
        # scipy takes a second, which dense vectors need not wait.
        from jaxret.search.approximate.seismic_index import open_seismic_index
        from jaxret.search.inverted_lists import InvertedLists, check_sparse, sparse_backend

        _require_lists(self.folder, options)
        if options.index:
            self.index = open_seismic_index(self.encoded_corpus, options.index, options.index_parameters)
            self._corpus = MappedCorpus(self.encoded_corpus)
            return
        backend = sparse_backend(options.backend)
        check_sparse(backend)
        self.lists = InvertedLists(self._own, many, backend)

    def _open_dense(self, options: SearchOptions, many: bool) -> None:
        """Load the backend, and what finds candidates, for a corpus of dense vectors; see `__init__`."""
        self.backend = select_backend(options.backend, self.encoded_corpus.ragged, options.precision)
        if options.index and self.encoded_corpus.cut[0]:
            raise ValueError(
                f"dimension={options.dimension}: the index {options.index} has the vectors as they are stored; leave "
                "one of the two out, or make a corpus of that size (jaxret encode --dimension) and build its index"
            )
        self.index = (
            open_faiss_index(self.encoded_corpus, options.index, options.index_parameters) if options.index else None
        )
        if self.index:
            self._corpus = MappedCorpus(self.encoded_corpus)
        if many and not self.index and self._own.total_rows:
            self._corpus = hold_in_memory(self._own, fits_devices(self._own, self.backend))
        if isinstance(self._corpus, InMemoryCorpus):  # else blocks are loaded anew for every search
            self.backend = with_many_searches(self.backend)
        self_check(self.backend, self.encoded_corpus.ragged)
        if options.candidate_spec:
            backend = select_backend(options.backend, precision=options.precision)
            self_check(backend)
            self.generator = CandidateGenerator.open(self._corpus, options.candidate_spec, backend, many)

    def is_stale(self) -> bool:
        """Return whether passages were appended, deleted or encoded again since the corpus was opened."""
        return corpus_version(self.folder) != self._version

    def search(self, queries: Sequence[Query], k: int, progress: bool = False) -> SearchOutcome:
        """Encode the queries and search for the k best passages of each, best first; exact but for `candidates` and
        `index`. Of several processes only the first names the passages; in others there are no rankings.

        Raises ValueError for k < 1 or no queries, and for more passages than there are candidates.
        """
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if self.generator:
            self.generator.spec.require(k)
        self.group.require_same({"k": k, "the queries": sha256_json([query.to_json() for query in queries])})
        cut, vectors = self.encode(queries, progress)
        result, ids = self.nearest(vectors, k, progress)
        rankings = {
            query.id: [(passage, float(score)) for passage, score in zip(row_ids, scores, strict=True)]
            for query, row_ids, scores in zip(queries, ids, result.scores)
        }
        approximate = self._approximate(k)
        return SearchOutcome(
            rankings, result, self.encoded_corpus, cut, vectors, self.filters, self.max_passage, approximate
        )

    def first(self, passages: int) -> Searcher:
        """Return a searcher of the first passages alone, in memory as those of many searches are. Raises as
        `require_first` does."""
        self.require_first(passages)
        return self._part(self.encoded_corpus.select_first(passages))

    def _part(self, encoded_corpus: EncodedCorpus) -> Searcher:
        part = copy.copy(self)
        part.encoded_corpus = part._own = encoded_corpus
        if self.lists:
            part._corpus, part.lists = (
                part.encoded_corpus,
                type(self.lists)(part.encoded_corpus, True, self.lists.backend),
            )
        else:
            part._corpus = hold_in_memory(part.encoded_corpus, fits_devices(part.encoded_corpus, self.backend))
        return part

    def among(self, rows: np.ndarray) -> Searcher:
        """Return a searcher of some rows alone (`matching_rows`), in memory as those of many searches are; it shares
        the rest. Raises ValueError for an approximate search."""
        self._require_parts()
        return self._part(self.encoded_corpus.select(rows))

    def require_first(self, passages: int) -> None:
        """Raise ValueError for an approximate search, and for more passages than there are."""
        self._require_parts()
        if not 1 <= passages <= self.encoded_corpus.total_rows:
            raise ValueError(f"the first {passages:,} passages: {self.folder} has {self.encoded_corpus.total_rows:,}")

    def _require_parts(self) -> None:
        if self.generator or self.index:
            raise ValueError("a part of a corpus is searched exactly; leave candidates and index out")
        if self.group.count != 1:
            raise ValueError("a part of a corpus is searched in one process; leave coordinator and engine out")

    def _approximate(self, k: int) -> dict[str, Any] | None:
        """Return how a search for k passages finds candidates, as JSON; None if it is exact."""
        if self.generator:
            return {"candidates": str(self.generator.spec)}
        return {"index": self.index.to_json(k)} if self.index else None

    def encode(self, queries: Sequence[Query], progress: bool = False) -> tuple[Truncation, TextVectors]:
        """Return the vectors of queries: text to tokens to vectors. Raises ValueError for no queries."""
        if not queries:
            raise ValueError("there is no query to search for")
        cut = Truncation("queries", self.run.tokenizer.query_length)

        def embed() -> TextVectors:
            return self._embed(self.run.tokenizer.queries(queries, progress, cut), progress)

        return cut, self.group.vectors_of_first(embed, self.encoded_corpus.sparse, self.encoded_corpus.dimension)

    def _embed(self, tokens: Ragged, progress: bool) -> TextVectors:
        return self.embedder(tokens, "query", progress)

    def nearest(self, vectors: TextVectors, k: int, progress: bool = False) -> tuple[SearchResult, list[list[str]]]:
        """Return the best passages for the vectors of each query, and their ids; with `max_passage` the best passages
        of the best documents, and the ids of these. Of several processes the first alone has ids."""
        corpus = self._corpus if self.group.count == 1 else self.encoded_corpus
        if self.max_passage:
            search_rows = functools.partial(self._search_rows, progress=progress)
            result = best_documents(
                search_rows,
                lambda rows: self.group.agreed(lambda: corpus.ids(rows)),
                vectors,
                k,
                self.encoded_corpus.total_rows,
            )
        else:
            result = self._search_rows(vectors, k, progress)
        ids = self.group.agreed(lambda: corpus.ids(result.rows.reshape(-1)) if self.group.leads else [])
        if self.max_passage:
            ids = [document_id(key) for key in ids]
        width = result.rows.shape[1]
        return result, [ids[i * width : (i + 1) * width] for i in range(len(result.rows) if self.group.leads else 0)]

    def _search_rows(self, vectors: TextVectors, k: int, progress: bool = False) -> SearchResult:
        """Return the best passages for the vectors of each query, of all processes."""
        own = self.group.agreed(lambda: self.search_own(vectors, k, progress))
        return self.group.merged(own, min(k, self.encoded_corpus.total_rows))

    def search_own(self, vectors: TextVectors, k: int, progress: bool = False) -> SearchResult:
        """Return the best passages of this process's rows, which are numbered through those of all."""
        result = self._search_own(vectors, k, progress)
        return replace(result, rows=result.rows + self.first_row) if self.first_row else result

    def _search_own(self, vectors: TextVectors, k: int, progress: bool) -> SearchResult:
        """Return the best passages of this process's rows."""
        if not self._own.total_rows:  # there are fewer shards than processes
            return no_result(len(vectors), self.description)
        if self.lists:
            assert isinstance(vectors, SparseRows)
            return self.lists.search(vectors, k, progress)
        if self.generator:
            assert isinstance(vectors, Ragged)
            return self.generator(vectors, self._corpus, k, progress)
        if self.index:
            search_index: Callable[..., SearchResult] = self.index.search
            return search_index(vectors, self._corpus, k)
        return search(vectors, self._corpus, k, self.backend, progress)

    def with_recall(self, outcome: SearchOutcome) -> SearchOutcome:
        """Return the outcome with the recall of an approximate search, for which some of its queries are searched
        exactly."""
        if not self.generator or isinstance(outcome.vectors, SparseRows):
            return outcome
        recall = compare_with_exact(self.generator.spec, outcome.result, outcome.vectors, self._corpus, self.backend)
        return replace(outcome, approximate=recall)

    def warm_up(self, queries: Sequence[Query], k: int) -> list[str]:
        """Compile the programs for queries of these lengths, one at a time, and read the vectors. Return ids of
        passages, those of the first query."""
        first_ids: list[str] = []
        tokens = self.run.tokenizer.queries(queries)
        of_length = {padded_length(int(length)): row for row, length in enumerate(tokens.lengths)}
        late = self.run.model.late_interaction  # as many vectors as tokens: a program for each length, too
        for number, row in enumerate(of_length.values()):
            vectors = self.embedder(tokens.take(np.array([row])), "query")
            if late or number == 0:
                _, (ids,) = self.nearest(vectors, k)
                first_ids = first_ids or ids
        return first_ids

    @property
    def description(self) -> str:
        """Return a line on the backend, index or candidates."""
        return (self.lists or self.generator or self.index or self.backend).description

    @property
    def vector_location(self) -> str:
        """Return where the vectors are for the next search: "memory"; "devices", alone; "disk", to be read; "mapped",
        of which an index needs a few."""
        if self.index:
            return "mapped"
        if self.lists:
            return "disk" if self.lists.blocks_in_memory is None else "memory"
        if not isinstance(self._corpus, InMemoryCorpus):
            return "disk"
        return "devices" if self._corpus.vectors is None else "memory"

    def best_vectors(self, outcome: SearchOutcome) -> list[list[tuple[int, ...]]]:
        """Return, for each passage of each ranking, which of its vectors has the highest product with each of the
        query's."""
        rows = outcome.result.rows
        if self.run.model.vectors_per_passage == 1:
            return [[(0,)] * rows.shape[1]] * len(rows)
        lists = iter(vectors_of(self._corpus, rows.reshape(-1)))
        return [
            [tuple((next(lists).astype(np.float64) @ query.T.astype(np.float64)).argmax(axis=0).tolist()) for _ in row]
            for query, row in zip(outcome.vectors, rows, strict=True)
        ]

    def scores(self, vectors: TextVectors, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the scores of each query, as vectors, with the passages in some rows, float64 rounded to float32."""
        every = sorted({row for ranking in rows for row in ranking})
        vectors_of_row = dict(zip(every, vectors_of(self._corpus, np.array(every, np.int64)), strict=True))

        def score(query: np.ndarray, row: int) -> float:
            products = vectors_of_row[row].astype(np.float64) @ query.T.astype(np.float64)  # [V,U]
            return float(np.float32(products.max(axis=0).sum()))

        return [[score(query, row) for row in ranking] for query, ranking in zip(vectors, rows, strict=True)]

    @property
    def bytes_read(self) -> int:
        """Return the bytes of the corpus's files that were read so far, by index."""
        return sum(texts.bytes_read for texts in self._texts)

    def passages(self, ids: Collection[str]) -> dict[str, Passage]:
        """Return the passages of the shards with these ids; read no others. With `max_passage`, documents
        (`join_passages`). Raises what opening `Passages` raises."""
        return join_passages(self._read_passages, ids) if self.max_passage else self._read_passages(ids)

    def passages_of_rows(self, rows: np.ndarray) -> list[Passage]:
        """Return the passage of each row, also with `max_passage`; one without text was encoded under "keep"."""
        ids = self.encoded_corpus.ids(rows)
        by_id = self._read_passages(set(ids))
        return [by_id[key] for key in ids]

    def best_passage(self, question: str, key: str) -> Passage:
        """Return the passage with an id; with `max_passage` and a question, the document's passage of the highest
        score. The id exists."""
        if not self.max_passage or not question:
            return self.passages({key})[key]
        rows = [
            row
            for first, ids in self.encoded_corpus.id_blocks()
            for row, one in enumerate(ids, first)
            if document_id(one) == key
        ]
        (scores,) = self.scores(self.encode([Query("0", question)])[1], [rows])
        return self.passages_of_rows(np.array([rows[int(np.argmax(scores))]]))[0]

    def missing_ids(self, ids: set[str]) -> set[str]:
        """Return those of the ids that no passage has; with `max_passage`, no document."""
        if not self.max_passage:
            return self.encoded_corpus.missing_ids(ids)
        absent_ids = set(ids)
        for _, block in self.encoded_corpus.id_blocks():
            absent_ids.difference_update(map(document_id, block))
        return absent_ids

    def _read_passages(self, ids: Collection[str]) -> dict[str, Passage]:
        self._texts = self._texts or [Passages(shards.folder) for shards in reversed(self.encoded_corpus.shards)]
        by_id: dict[str, Passage] = {}
        for texts in self._texts:  # an id that was deleted may have come again: the last one counts
            missing_ids = [key for key in ids if key not in by_id]
            by_id |= texts.read(missing_ids) if missing_ids else {}
        return {key: by_id.get(key) or Passage(key, "") for key in ids}  # one without text was encoded under "keep"
