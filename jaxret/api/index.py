"""A corpus that a retriever encoded, opened for search from Python."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.api.arguments import (
    checked_passages,
    checked_questions,
    listed_texts,
    require_flag,
    require_kind,
    require_path,
    whole_number,
)
from jaxret.api.retriever import Retriever, Vectors
from jaxret.data.formats import Corpus
from jaxret.data.lines import PathLike
from jaxret.data.records import Passage, Query
from jaxret.evaluation.text_table import Html, html_paragraphs, html_table
from jaxret.index.encoded_corpus import corpus_state, open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import cut_encoded, default_name, encode_corpus, find_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_ids
from jaxret.parallel.forks import require_unforked
from jaxret.search.passage_vectors import require_options
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import atomic_write, sha256_bytes
from jaxret.storage.buckets.working_copy import folder_files, publish


@dataclass(frozen=True)
class Hit:
    """A passage of a ranking.

    Attributes:
        id: id of the passage.
        score: float32, the highest inner product of a vector of the passage with the query's; under late interaction
            the sum of these maxima.
        title: title of the passage; "" without one.
        text: text of the passage.
        vectors: numbers, from 0, of the passage's vectors with the highest products: one for each vector of the query
            (nearly always one).
        metadata: metadata of the passage's record, if the search was asked for them, else {}.
    """

    id: str
    score: float
    title: str
    text: str
    vectors: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)

    def _repr_html_(self) -> Html:
        """Return what a notebook shows."""
        return Hits([self])._repr_html_()


class Hits(list[Hit]):
    """The passages of a query, best first: a list that a notebook shows as a table."""

    def _repr_html_(self) -> Html:
        """Return what a notebook shows."""
        several = any(len(set(hit.vectors)) > 1 or hit.vectors != (0,) for hit in self)
        header = ["title", "text", "id", "score", *(["vector"] if several else [])]
        vectors = ([" ".join(map(str, hit.vectors))] if several else [] for hit in self)
        rows = [
            [hit.title, hit.text, hit.id, f"{hit.score:.4f}", *of_hit]
            for hit, of_hit in zip(self, vectors, strict=True)
        ]
        return html_table(header, rows, left=3)


class SearchHits(list[list[Hit]]):
    """The rankings of some queries: a list that a notebook shows as a table for each."""

    def __init__(self, questions: Sequence[str], rankings: Iterable[Hits]) -> None:
        super().__init__(rankings)
        self._questions = tuple(questions)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook."""
        pairs = zip(self._questions, self, strict=False)  # the user may have shortened the list
        return "".join(html_paragraphs([question, Hits(hits)._repr_html_()]) for question, hits in pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the questions, too."""
        return SearchHits, (self._questions, list(self))


class Index:
    """An encoded corpus, opened for search. The search is exact unless the options have an index or candidates."""

    def __init__(self, retriever: Retriever, corpus: PathLike = "", options: SearchOptions = SearchOptions()) -> None:
        require_kind("retriever", retriever, Retriever, "a Retriever")
        require_path("corpus", corpus, "the name or the path of a corpus", empty=True)
        _require_search_options(options)
        # An absolute path, because texts and shards are read later, when the working directory may have changed.
        folder = corpus_folder(retriever.run.workdir, os.fspath(corpus), "corpus=NAME").absolute()
        self.retriever, self._options = retriever, options
        self._state = corpus_state(folder)
        self._searcher = Searcher(retriever.run, folder, options, many=True)

    @classmethod
    def open(
        cls, source: Retriever | PathLike, corpus: PathLike = "", options: SearchOptions = SearchOptions()
    ) -> Index:
        """Open a corpus that was encoded, by `build` or by `jaxret encode`. Every file of vectors is compared with its
        digest. The file of the texts, which is elsewhere, is compared with its size and time, and with its digest if
        these differ.

        For an exact search on accelerators, the corpus stays in their memory if it fits.

        Args:
            source: a retriever, or the folder of a run.
            corpus: name of the encoded corpus, or the folder or file that was encoded; needed if there are several.
            options: how candidates are found, like the flags of `jaxret search`. SearchOptions(backend="xla",
                precision="bfloat16") needs half the memory and gives the same results. These are approximate:
                SearchOptions(index="NAME") uses an index that `jaxret index` built, and
                SearchOptions(candidates="mean:1000") scores the 1,000 best passages by one vector each.

        Raises:
            FileNotFoundError: there is no such corpus or index.
            ContractError: (a ValueError) another model or checkpoint encoded it.
            ShardError: (a ValueError) a file is missing or damaged.
            ValueError: `candidates` is set, but passages have one vector.
        """
        if isinstance(source, Retriever):
            return cls(source, corpus, options)
        require_path("source", source, "a Retriever or the folder of a run")
        return cls(Retriever.open(source), corpus, options)

    @classmethod
    def build(
        cls,
        retriever: Retriever,
        corpus: PathLike | Iterable[str | Passage],
        name: str = "",
        encoding: EncodeOptions = EncodeOptions(),
        options: SearchOptions = SearchOptions(),
        progress: bool = True,
    ) -> Index:
        """Encode a corpus, as `jaxret encode` does, and open it. Vectors that exist already are not encoded again.

        Args:
            retriever: encodes the passages.
            corpus: a folder or file of any format, or a list of passages, which is stored next to the vectors, with
                their metadata. The id of a plain text is its number from 0.
            name: name of the encoded corpus; default: the name of the folder or file, or "passages".
            encoding: options of the encoding, such as EncodeOptions(on_error="skip", dtype="float16").
            options: options of the search, as for `open`.
            progress: whether to show progress.

        Raises:
            DataError: (a ValueError) a bad record.
            ContractError: (a ValueError) another corpus has that name.
            FileNotFoundError: the encoded corpus has no such index.
            ValueError: the vectors of the retriever do not support the options.
        """
        require_unforked()
        require_kind("retriever", retriever, Retriever, "a Retriever")
        require_kind("name", name, str, "a text")
        require_kind("encoding", encoding, EncodeOptions, "an EncodeOptions")
        _require_search_options(options)
        require_flag("progress", progress)
        run = retriever.run
        if not isinstance(corpus, str | os.PathLike):
            require_kind("corpus", corpus, Iterable, "a path, or a list of passages")
            folder = run.workdir.embeddings(name or "passages")
            require_options(run, folder, options)
            with _passages_file(folder, checked_passages(corpus, "corpus")) as path:
                encode_corpus(run, Corpus.open(path), folder.name, encoding, progress)
            return cls(retriever, folder.name, options)
        require_path("corpus", corpus, "a path, or a list of passages")
        source = os.fspath(corpus)
        text_corpus = find_corpus(source, encoding)
        name = name or default_name(text_corpus or source, encoding.dimension)
        require_options(run, run.workdir.embeddings(name), options)
        if text_corpus is None:  # the name of an encoded corpus
            cut_encoded(run, source, encoding, name, progress)
        else:
            encode_corpus(run, text_corpus, name, encoding, progress)
        return cls(retriever, name, options)

    def __len__(self) -> int:
        """Return the number of passages."""
        return self._searcher.encoded_corpus.total_rows

    def search(self, queries: Sequence[str], k: int = 10, *, texts: bool = True, metadata: bool = False) -> SearchHits:
        """Return the k best passages of each question, best first, or all of a smaller corpus.

        The result is a list of lists of hits, which a notebook shows as tables. Passages with equal scores are in the
        order of the corpus.

        Args:
            queries: questions.
            k: number of passages of each question.
            texts: whether to read titles and texts. If neither texts nor metadata are read, the file of the corpus is
                not needed.
            metadata: whether to read the metadata of the passages' records: `metadata` of BEIR, and keys and columns
                that are not part of the format. The metadata of a document are those of its best passage.

        Warns, once for each change, if passages were appended, deleted or encoded again since the index was opened.
        Raises ValueError for a question that is blank or not a text, for k < 1, and for k above the number of
        candidates. Raises FileNotFoundError if the file of the corpus was moved, and ContractError (a ValueError) if it
        was changed.
        """
        k, searcher = whole_number("k", k), self._searcher  # another thread may refresh the index
        require_flag("texts", texts)
        require_flag("metadata", metadata)
        questions = [Query(str(number), text) for number, text in enumerate(checked_questions(queries))]
        if not questions:
            return SearchHits([], [])
        self._warn_if_stale()
        outcome = searcher.search(questions, k)
        rankings = [outcome.rankings[query.id] for query in questions]
        ids = {key for ranking in rankings for key, _ in ranking}
        passages = searcher.texts.read(ids) if texts else {key: Passage(key, "") for key in ids}
        best_vectors = searcher.best_vectors(outcome)
        rows = outcome.result.rows
        fields = iter(searcher.texts.metadata_of_rows(rows.reshape(-1)) if metadata else [{} for _ in range(rows.size)])
        hits = (
            Hits(
                Hit(key, score, passages[key].title, passages[key].text, vectors, next(fields))
                for (key, score), vectors in zip(ranking, of_ranking, strict=True)
            )
            for ranking, of_ranking in zip(rankings, best_vectors, strict=True)
        )
        return SearchHits([question.text for question in questions], hits)

    def filtered(self, *filters: str) -> Index:
        """Return an index of the passages whose metadata match filters "FIELD:VALUE" or "FIELD>=BOUND" (also >, <=, <).

        A passage matches if, for every field in the filters, it has one of the given values, and if this value is in
        all ranges of the field. The new index has its own vectors in memory.

        Raises ValueError for a field, a value or a range that no passage has, and for an approximate index.
        """
        for number, text in enumerate(filters):
            require_kind(f"filters[{number}]", text, str, 'a text "FIELD:VALUE"')
        options = replace(self._options, filters=(*self._options.filters, *filters))
        return Index(self.retriever, self._searcher.folder.name, options)

    def append(
        self,
        passages: PathLike | Iterable[str | Passage],
        encoding: EncodeOptions = EncodeOptions(),
        progress: bool = True,
    ) -> None:
        """Encode more passages, as `jaxret encode --append` does; later searches include them.

        The ids of plain texts continue the numbers of all passages that were ever encoded, so that equal texts become
        new passages. The same `Passage` objects change nothing if they are appended again.

        Raises ValueError for an id that is already in the corpus, and for an approximate index, which cannot grow.
        """
        require_unforked()
        require_kind("encoding", encoding, EncodeOptions, "an EncodeOptions")
        require_flag("progress", progress)
        self._require_no_index()
        folder = self._searcher.folder
        if isinstance(passages, str | os.PathLike):
            require_path("passages", passages, "a path, or a list of passages")
            append_corpus(self.retriever.run, Corpus.open(os.fspath(passages)), folder, encoding, progress)
        else:
            total_rows = int(open_encoded(folder, verify=False).firsts[-1])
            with _passages_file(folder, checked_passages(passages, "passages", total_rows)) as path:
                append_corpus(self.retriever.run, Corpus.open(path), folder, encoding, progress)
        self.refresh()

    def delete(self, ids: Iterable[str]) -> int:
        """Delete the passages with these ids, as `jaxret encode --delete` does. Return the number of deleted passages.

        Raises ValueError, and deletes nothing, for an id that the corpus never had, and if no passage would be left.
        """
        require_unforked()
        self._require_no_index()
        arguments = {key: f"ids[{number}]" for number, key in enumerate(listed_texts(ids, str, "ids"))}
        self.refresh()
        if all(key in arguments for _, block in self._searcher.encoded_corpus.id_blocks() for key in block):
            raise ValueError(
                f"ids has all {len(self):,} passages of the index, which would have no passage to search: nothing was "
                "deleted; `jaxret encode --delete` can delete all passages"
            )
        count, _ = delete_ids(self._searcher.folder, arguments)
        self.refresh()
        return count

    def is_stale(self) -> bool:
        """Return whether passages were appended, deleted or encoded again, by any job, since this index was opened.

        Searches then warn, and use the old passages until `refresh` is called.
        """
        return self._searcher.is_stale()

    def refresh(self) -> bool:
        """Open the corpus again if it was changed. Return whether it was changed.

        Searches in other threads continue with the old passages. Raises the same errors as `open`; the index is then
        unchanged.
        """
        if not self.is_stale():
            return False
        state = corpus_state(self._searcher.folder)
        self._searcher = Searcher(self.retriever.run, self._searcher.folder, self._options, many=True)
        self._state = state
        return True

    def _warn_if_stale(self) -> None:
        if (state := corpus_state(self._searcher.folder)) != self._state:
            self._state = state
            if self.is_stale():
                message = f"{self._searcher.folder} was changed after this index was opened: refresh() opens it again"
                warnings.warn(message, stacklevel=3)

    def rows(self, block: int = 1024) -> Iterator[tuple[list[str], Vectors]]:
        """Yield the ids and vectors of at most `block` passages at a time, in the order of the corpus, from disk.

        Vectors equal the result of `Retriever.encode_passages`, rounded to the stored dtype: float32 [n,V,D], or a list
        of [V,D] if passages have different numbers of vectors.

        Raises ValueError if `block` is below 1.
        """
        if (block := whole_number("block", block)) < 1:
            raise ValueError(f"block is {block}; it must be at least 1")
        return self._rows(block)

    def _rows(self, block: int) -> Iterator[tuple[list[str], Vectors]]:
        shards = self._searcher.encoded_corpus
        for first, shard in shards:
            for start in range(0, len(shard), block):
                rows = np.arange(start, min(start + block, len(shard)))
                ids = shards.ids(first + rows)
                if shards.ragged:
                    yield ids, [np.array(shard[row], np.float32) for row in rows]
                elif shards.sparse:
                    yield ids, shard.take(rows).stacked().astype(np.float32)
                else:
                    yield ids, np.array(shard[start : rows[-1] + 1], np.float32)

    def _require_no_index(self) -> None:
        if self._options.index:
            raise ValueError(
                f"the approximate index {self._options.index} cannot change: open the corpus without it, change the "
                "corpus, and build the index again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the retriever, the name of the corpus and the options, but not the vectors."""
        return Index, (self.retriever, self._searcher.folder.name, self._options)

    def __repr__(self) -> str:
        return f"Index({str(self._searcher.folder)!r}, {len(self):,} passages, {self._searcher.vectors.description})"


def _require_search_options(options: Any) -> None:
    """Raise ValueError for other types than SearchOptions, and for options of several processes, which an Index does
    not support."""
    require_kind("options", options, SearchOptions, "a SearchOptions")
    if options.workers:
        raise ValueError("an Index searches in this process: remove options.workers, which only `jaxret search` uses")
    if options.all_processes:
        raise ValueError("an Index searches in this process: remove options.all_processes, which only a Searcher uses")


@contextlib.contextmanager
def _passages_file(folder: Path, passages: Iterable[Passage]) -> Iterator[Path]:
    """Write the passages into a folder as a file in the format of BEIR's corpora, and yield it. Its name is a digest of
    its content, so existing vectors are never replaced. If an error occurs before anything was made from the file, it
    is removed."""
    records = (
        {"_id": passage.id, "title": passage.title, "text": passage.text}
        | ({"metadata": dict(passage.metadata)} if passage.metadata else {})
        for passage in passages
    )
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if not data:
        raise ValueError("there is no passage to encode; give a list with some")
    path = folder / f"passages-{sha256_bytes(data)[:16]}.jsonl"
    if path.exists():
        yield path
        return
    with atomic_write(path, "wb") as file:
        file.write(data)
    names = {name for name, _ in folder_files(folder)}
    try:
        yield path
    except BaseException:
        if {name for name, _ in folder_files(folder)} == names:
            path.unlink(missing_ok=True)
            publish(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds if the folder is empty
        raise
