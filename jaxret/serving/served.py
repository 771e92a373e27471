"""Served runs. The thread of a request turns texts into tokens; the thread of the device turns tokens into answers.

Every text is padded to one of a few lengths. At most `ServeOptions.batch` texts are computed at a time. `warm_up`
compiles the programs of all these shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxret.api import Retriever
from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.experiments.explain import explain, vector_labels
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.models.encoders.stack import split_layers
from jaxret.models.heads.head import Side
from jaxret.runs.cut_vectors import cut_vectors
from jaxret.runs.embedder import Embedder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher, SearchOutcome
from jaxret.serving.filter_searchers import FilterSearchers
from jaxret.serving.refusal import RefusalError, shown
from jaxret.serving.serve_options import ServeOptions, named_run
from jaxret.serving.served_reranker import ServedReranker
from jaxret.serving.shapes import batch_sizes, served_length, served_lengths
from jaxret.types import Ragged, TextVectors

# Numbers of passages for which searches are compiled. The first k of a longer ranking are the answer.
COUNTS = (10, 30, 100, 300, 1000)
_SHORT = 64  # upper bound of the tokens of a single text that is computed without a loop over layers
_COPIED_BYTES = 2**30  # largest parameters, in bytes, of which a second copy is kept for such texts


@dataclass(frozen=True)
class SearchHit:
    """A passage of a ranking."""

    id: str
    score: float  # the score of `jaxret.Hit`
    title: str  # "" if the server has no texts
    text: str  # "" if the server has no texts
    # for each vector of the query, the number of the passage's vector with the highest product
    vectors: tuple[int, ...]
    winners: tuple[str, ...]  # names of these vectors; () if a passage has one vector


@dataclass(frozen=True)
class SearchAnswer:
    """The ranking of a question."""

    hits: list[SearchHit]  # best first
    backend: str  # description of the search backend
    rounds: int  # rounds of the proof of the question's batch
    scored_pairs: int  # pairs of this batch that were scored exactly
    batch: int  # number of questions in this batch
    rows: np.ndarray  # row of each hit's passage; for documents, of their best passages


class ServedRetriever:
    """A retriever's run, its corpus if there is one, and its operations."""

    task = "retrieval"

    def __init__(
        self, workdir: str, encoded_name: str, checkpoint: str, options: ServeOptions, search: SearchOptions
    ) -> None:
        """Open the run and the corpus.

        Args:
            workdir: folder of the run, or NAME=FOLDER.
            encoded_name: name of the encoded corpus; "": the only one.
            checkpoint: "best", "last" or a step.
            options: limits of the server.
            search: options of searches.

        Raises the errors of `Retriever.open`, `corpus_folder` and `Searcher`, and FileNotFoundError or ContractError if
        texts cannot be shown.
        """
        self.name, workdir = named_run(workdir)
        self.options = options
        folder = corpus_folder(Workdir(workdir), encoded_name).absolute() if options.search else None
        length = open_encoded(folder, verify=False).fingerprint["contract"].get("passage_length") if folder else None
        retriever = Retriever.open(workdir, checkpoint, passage_length=length)
        run: Run = replace(retriever.run, padding=served_length)
        self._uncut_run, self._search_options = run, search
        self.searcher = Searcher(run, folder, search, many=True) if folder else None
        self.run = self.searcher.run if self.searcher else run  # the searcher's run cuts vectors like the corpus
        self.embedder = self.searcher.embedder if self.searcher else run.embedder()
        self._short_embedder = embedder_of_one(self.embedder)
        self.encoded_name = folder.name if folder else ""
        self.filters = FilterSearchers(self.searcher) if self.searcher else None
        if self.searcher and options.texts:
            _require_texts(self.searcher)

    # Facts

    @property
    def dimension(self) -> int:
        return self.run.model.dimension

    @property
    def single(self) -> bool:
        """Whether every text has one dense vector."""
        model = self.run.model
        return model.vectors_per_passage == 1 and not model.late_interaction and not model.sparse

    @property
    def passages(self) -> int:
        """Number of passages that are searched. Raises `RefusalError` without a corpus."""
        return self._searcher().encoded_corpus.total_rows

    def vectors_of(self, tokens: Sequence[np.ndarray], side: Side) -> int:
        """Return the total number of vectors of texts."""
        return int(self.run.model.vector_counts(Ragged.from_lists([ids.tolist() for ids in tokens]), side).sum())

    def side_is_single(self, side: Side) -> bool:
        """Return whether the texts of a side have one dense vector."""
        return self.single or (side == "query" and not self.run.model.late_interaction and not self.run.model.sparse)

    @property
    def is_stale(self) -> bool:
        """Whether passages were appended, deleted or encoded again since the corpus was opened."""
        return self.searcher is not None and self.searcher.is_stale()

    def reopen(self) -> ServedRetriever:
        """Return this model with the corpus as it is now, ready to be searched; this model stays as it is.

        Raises ContractError if the corpus was encoded again with other settings, or if it has no passage left, and
        OSError if its files cannot be read.
        """
        base = self._searcher()
        try:
            searcher = Searcher(self._uncut_run, base.folder, self._search_options, many=True)
        except ValueError as error:
            raise ContractError(str(error)) from error
        if searcher.encoded_corpus.dimension != base.encoded_corpus.dimension:
            raise ContractError(f"{base.folder} has vectors of another size than before; restart the server")
        searcher.embedder = self.embedder  # the programs of this embedder are compiled already
        if self.options.texts:
            _require_texts(searcher)
        model = copy(self)
        model.searcher, model.filters = searcher, FilterSearchers(searcher)
        model.warm_up(sides=("query",))
        return model

    # In the thread of a request

    def tokens(self, texts: Sequence[str], side: Side, cut: bool = True) -> list[np.ndarray]:
        """Return the token ids of texts. Raises `RefusalError` for a text that is too long, unless `cut`."""
        tokenizer = self.run.tokenizer
        limit = tokenizer.query_length if side == "query" else tokenizer.passage_length
        truncation = Truncation("texts", limit)
        if side == "query":
            ids = tokenizer.queries(texts, truncation=truncation)
        else:
            ids = tokenizer.passages([Passage("0", text) for text in texts], truncation=truncation)
        if truncation.cut and not cut:
            raise RefusalError(413, f"{truncation.cut} of the texts have more than {limit} tokens", "too_long")
        return list(ids)

    def cut(self, vectors: Sequence[np.ndarray], dimensions: int) -> list[np.ndarray]:
        """Return the vectors cut to their first dimensions, as `jaxret encode --dimension` stores them. Raises
        `RefusalError` for a number of dimensions that the model does not allow."""
        if dimensions == self.dimension:
            return list(vectors)
        if not 1 <= dimensions < self.dimension:
            message = f"dimensions is {dimensions}; it must be 1 to {self.dimension}, the size of a vector"
            raise RefusalError(400, message)
        try:
            smaller = self.run.model.with_dimension(dimensions, "dimensions")
        except ValueError as error:
            raise RefusalError(400, str(error)) from None
        return [cut_vectors(text_vectors, smaller.dimension, smaller.module.normalize) for text_vectors in vectors]

    def count(self, k: int) -> int:
        """Return the number of passages to search for; the first k of them are the answer. Raises RefusalError if `k`
        exceeds the number of candidates that the server scores."""
        searcher = self._searcher()
        generator = searcher.vectors.generator
        if generator and k > generator.spec.passages:
            raise RefusalError(422, f"k is {k}; this server scores {generator.spec.passages} candidates")
        if not searcher.vectors.is_exact():
            return k
        return next((count for count in COUNTS if count >= k), k)

    # In the thread of the device

    def embed(self, items: Sequence[np.ndarray], side: Side) -> list[np.ndarray]:
        """Return the vectors [V,D] of each text."""
        rows: list[np.ndarray] = [np.empty(0)] * len(items)
        for part, vectors in self._embed_batches(items, side):
            for row, text_vectors in zip(part, vectors, strict=True):
                rows[row] = text_vectors
        return rows

    def search(self, items: Sequence[np.ndarray], k: int, searcher: Searcher, texts: bool) -> list[SearchAnswer]:
        """Return the ranking of each question.

        Args:
            items: token ids of questions.
            k: number of passages.
            searcher: searcher of all passages, or of those that match a filter.
            texts: whether to read titles and texts.
        """
        answers: list[SearchAnswer | None] = [None] * len(items)
        for part, vectors in self._embed_batches(items, "query"):
            result, ids = searcher.nearest(vectors, k)
            outcome = SearchOutcome({}, result, searcher.encoded_corpus, Truncation("queries", 0), vectors)
            best = searcher.best_vectors(outcome)
            passage_ids = {key for ranking in ids for key in ranking}
            passages = searcher.texts.read(passage_ids) if texts else {}
            hit_passages = [[passages.get(key) or Passage(key, "") for key in ranking] for ranking in ids]
            chunks = hit_passages  # the passages with the vectors; for documents, their best passages
            if texts and searcher.max_passage:
                chunks = [searcher.texts.of_rows(rows) for rows in result.rows]
            for place, row in enumerate(part):
                hits = [
                    self._hit(passage, chunk, float(score), vector)
                    for passage, chunk, score, vector in zip(
                        hit_passages[place], chunks[place], result.scores[place], best[place], strict=True
                    )
                    if np.isfinite(score)
                ]
                counts = len(result.rounds), result.scored_pairs, len(part)
                rows = result.rows[place][np.isfinite(result.scores[place])]
                answers[row] = SearchAnswer(hits, result.backend, *counts, rows)
        return [answer for answer in answers if answer]

    def explanations(self, items: Sequence[tuple[str, Passage | None, str]], top: int) -> list[str | RefusalError]:
        """Return an explanation, or an error, for each (question, passage or None, id of a passage or "")."""
        return [self._explanation(*item, top) for item in items]

    def warm_up(
        self,
        report: Callable[[str], object] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
        sides: Sequence[Side] = ("query", "passage"),
    ) -> int:
        """Compile the programs of both sides, and return the number of programs.

        Args:
            report: called with a text about each part.
            should_stop: called before each program; returns whether to leave out the rest.
            sides: sides whose programs are compiled. Those of queries include the searches.
        """
        late_interaction = self.run.model.late_interaction
        for side in sides:
            tokenizer = self.run.tokenizer
            limit = tokenizer.query_length if side == "query" else tokenizer.passage_length
            for length in served_lengths(limit):
                for count in batch_sizes(self.options.batch):
                    if should_stop():
                        return self.embedder.programs
                    ids = [np.full(length, tokenizer.sep_id, np.int32)] * count
                    vectors = self._vectors(ids, side)
                    first = length == served_lengths(limit)[0]
                    if side == "query" and self.searcher and (late_interaction or first):
                        for k in self._warm_counts():
                            self.searcher.nearest(vectors, k)
            report(f"{self.name}: compiled the {side} side, texts of up to {limit} tokens")
        return self.embedder.programs

    def _warm_counts(self) -> list[int]:
        """Return all numbers of passages that an exact search may be asked for."""
        searcher, largest_k = self._searcher(), self.options.most_k
        if searcher.vectors.generator:
            largest_k = min(largest_k, searcher.vectors.generator.spec.passages)
        return sorted({self.count(min(count, largest_k)) for count in (*COUNTS, largest_k)})

    def _searcher(self) -> Searcher:
        if self.searcher is None:
            raise RefusalError(404, f"{self.name} is served without a corpus (--nosearch)", "no_corpus")
        return self.searcher

    def _embed_batches(self, items: Sequence[np.ndarray], side: Side) -> Iterator[tuple[list[int], TextVectors]]:
        """Yield (positions in `items`, vectors) of batches, the shortest texts first."""
        order = np.argsort([len(ids) for ids in items], kind="stable").tolist()
        for start in range(0, len(order), self.options.batch):
            part = order[start : start + self.options.batch]
            yield part, self._vectors([items[row] for row in part], side)

    def _vectors(self, ids: Sequence[np.ndarray], side: Side) -> TextVectors:
        short_embedder = self._short_embedder if len(ids) == 1 and len(ids[0]) <= _SHORT else None
        return (short_embedder or self.embedder)(Ragged.from_lists([row.tolist() for row in ids]), side)

    def _hit(self, passage: Passage, chunk: Passage, score: float, vectors: tuple[int, ...]) -> SearchHit:
        names = self._names(chunk)
        winners = tuple(names[place] for place in vectors) if max(vectors, default=0) < len(names) else ()
        return SearchHit(passage.id, score, passage.title, passage.text, vectors, winners)

    def _names(self, passage: Passage) -> list[str]:
        """Return a name for each vector of a passage, or [] if a passage has one vector."""
        model = self.run.model
        if model.vectors_per_passage == 1:
            return []
        if names := model.module.head.vector_names():
            return list(names) if len(names) == model.vectors_per_passage else []
        if not passage.text and not passage.title:
            return []
        return vector_labels(self.run, self.run.tokenizer.passages([passage]), "passage")

    def question_labels(self, ids: np.ndarray) -> list[str]:
        """Return a label for each vector of a question, or [] if a question has one vector."""
        if not self.run.model.late_interaction:
            return []
        return vector_labels(self.run, Ragged.from_lists([ids.tolist()]), "query")

    def _explanation(self, question: str, passage: Passage | None, key: str, top: int) -> str | RefusalError:
        if key:
            searcher = self._searcher()
            if searcher.texts.missing_ids({key}):
                return RefusalError(404, f"the corpus has no passage {shown(key)}", "no_passage")
            passage = searcher.best_passage(question, key)
            if not passage.text and not passage.title:
                return RefusalError(404, f"passage {shown(key)} has no text", "no_text")
        explained_side: Side = "query" if question else "passage"
        if not (question and passage) and not self.run.model.module.head.word_values(explained_side):
            return RefusalError(422, "this run explains a query and a passage together only: give both")
        return explain(self.run, question, passage, top)


ServedModel = ServedRetriever | ServedReranker


def open_served(
    workdirs: Sequence[str], encoded_name: str, checkpoint: str, options: ServeOptions, search: SearchOptions
) -> list[ServedModel]:
    """Open runs of retrievers and of cross-encoders.

    Args:
        workdirs: folders of runs. The name of a run is the last part of its path, or NAME in NAME=FOLDER.
        encoded_name: encoded corpus; "": the only one of each run.
        checkpoint: "best", "last" or a step.

    Raises ValueError for two runs with one name, and the errors of opening them.
    """
    names = [named_run(workdir)[0] for workdir in workdirs]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"two runs have the name {min(repeated)}, the last part of their paths; name one with NAME=FOLDER"
        )
    models: list[ServedModel] = []
    for workdir in workdirs:
        if stored_config(Workdir(named_run(workdir)[1])).task == "reranking":
            models.append(ServedReranker(workdir, checkpoint, options))
        else:
            models.append(ServedRetriever(workdir, encoded_name, checkpoint, options, search))
    return models


def embedder_of_one(embedder: Embedder) -> Embedder | None:
    """Return an embedder for one short text at a time, which is faster on a CPU because it reads the layers once.
    Return None for other devices, and if a second copy of the model would need too much memory."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(embedder.params))
    if embedder.mesh.size > 1 or jax.default_backend() != "cpu" or size > _COPIED_BYTES:
        return None
    return replace(embedder, params=split_layers(embedder.params), program_cache={})


def _require_texts(searcher: Searcher) -> None:
    """Read one text as a check. Raises the errors of `Passages`, with a remedy."""
    try:
        searcher.texts.read(set(searcher.encoded_corpus.ids([0])))
    except (OSError, ValueError) as error:
        raise type(error)(f"{str(error).rstrip('.')}; --notexts serves ids and scores without texts") from error
