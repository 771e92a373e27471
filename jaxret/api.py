"""jaxret from Python: a `Retriever` turns texts into vectors, an `Index` finds the best passages. docs/python.md has
examples, which the tests run.

Both keep what they opened: parameters, compiled programs, vectors, and the position of each passage's text. A text of a
new length compiles a program, and so does a new number of texts (1, to 8, to 16, ...); nothing else does after the
first search.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.configs import change_config, load_config
from jaxret.data.errors import Location
from jaxret.data.record_checks import check_passage, check_question
from jaxret.data.records import Passage, Query
from jaxret.data.tokens.tokenizer import AUTO_SEPARATOR
from jaxret.export.import_model import make_run
from jaxret.index.encode import encode_corpus
from jaxret.index.encode_options import EncodeOptions
from jaxret.models.encoders.pretrained import resolve_encoder
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher, corpus_folder
from jaxret.storage.atomic import atomic_write, sha256_bytes
from jaxret.storage.temporary import TemporaryFolder
from jaxret.training.loop import train

__all__ = ["EncodeOptions", "Hit", "Index", "Passage", "Retriever", "SearchOptions"]

PathLike = str | os.PathLike[str]
Vectors = np.ndarray | list[np.ndarray]


class Retriever:
    """A run that was opened: texts -> vectors."""

    def __init__(self, run: Run, temporary: TemporaryFolder | None = None) -> None:
        self.run = run
        self._embed = run.embedder()
        self._temporary = temporary  # the folder of the run, if it goes with the retriever

    @classmethod
    def open(
        cls,
        workdir: PathLike,
        checkpoint: str = "best",
        *,
        query_length: int | None = None,
        passage_length: int | None = None,
    ) -> Retriever:
        """Open the folder of a run.

        Args:
            workdir: folder of the run.
            checkpoint: "best", "last", or a step.
            query_length: most tokens of a query; default: as in training.
            passage_length: most tokens of a passage; default: as in training.

        Raises:
            FileNotFoundError: there is no such run.
            ContractError: (a ValueError) a file of the run was changed.
        """
        if not _is_run(workdir):
            raise FileNotFoundError(
                f"{workdir} is no run; Retriever.from_model opens a model that was not trained here"
            )
        return cls(open_run(workdir, checkpoint, query_length, passage_length))

    @classmethod
    def from_model(
        cls,
        source: PathLike,
        workdir: PathLike | None = None,
        *,
        token: str = "",
        normalize: bool | None = None,
        download: bool = False,
        title_separator: str = AUTO_SEPARATOR,
    ) -> Retriever:
        """Open a model of another library as a run.

        Args:
            source: a Hugging Face or sentence-transformers directory, `package:NAME/FOLDER`, or a hub name in the local
                cache.
            workdir: folder of the run, where it is found again; default: a temporary folder, which is removed with
                everything that was encoded.
            token: of an encoder alone: its vector, "cls" or "mean".
            normalize: of an encoder alone: vectors have length 1, for cosines.
            download: fetch a hub name that is not in the cache.
            title_separator: between title and text of a passage, or "[SEP]"; "auto": a blank for a
                sentence-transformers or PyLate directory, else "[SEP]".

        Raises:
            FileNotFoundError: there is no such model.
            ValueError: it cannot be used here, or is a run.
        """
        if _is_run(source):
            raise ValueError(f"{source} is a run: Retriever.open opens it")
        _require_model(source, download)
        temporary = None if workdir else TemporaryFolder()
        folder = temporary.path if temporary else Path(workdir or "")
        try:
            make_run(os.fspath(source), folder, token, download, normalize, title_separator, progress=False)
            return cls(open_run(folder), temporary)
        except BaseException:
            if temporary:
                temporary.remove()
            raise

    @classmethod
    def train(
        cls,
        config: str | ConfigDict,
        workdir: PathLike,
        changes: Mapping[str, Any] | None = None,
        *,
        progress: bool = True,
    ) -> Retriever:
        """Train as `jaxret train --config=CONFIG --workdir=WORKDIR` does, and open the best checkpoint.

        The same call again goes on with a run that was interrupted, and opens one that is done.

        Args:
            config: a name ("mlr", "minilm:dual_encoder"), a file, or the ConfigDict of such a file.
            workdir: folder of the run.
            changes: keys and their values, as {"data.train": "FOLDER_OR_FILE", "train.steps": 1000}; configs/base.py
                explains all.
            progress: show progress.

        Raises:
            ValueError: a config that makes no sense.
            DataError: (a ValueError) bad records.

        It raises what `jaxret.training.loop.train` raises, too.
        """
        named = isinstance(config, str)
        settings = change_config(
            load_config(config) if named else config, changes or {}, config if named else "this config"
        )
        train(settings, Path(workdir), progress, explicit_keys=changes or {}).require_finished()
        return cls.open(workdir)

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """Return the vectors of questions: float32 [Q,D]; under late interaction a list of [U,D], U vectors for each.
        Raises ValueError for a question that is blank or no text."""
        vectors = self._embed(self.run.tokenizer.queries(_questions(queries)), "query")
        return list(vectors) if self.run.model.late_interaction else vectors.stacked()[:, 0]

    def encode_passages(self, passages: Sequence[str | Passage]) -> Vectors:
        """Return the vectors of passages: float32 [N,V,D]; a list of [V,D] where each passage has its own number.

        The score of a passage is the highest product of one of them with the query's. Raises ValueError for a passage
        that is no text.
        """
        vectors = self._embed(self.run.tokenizer.passages(list(_passages(passages))), "passage")
        return list(vectors) if self.run.model.vectors_per_passage is None else vectors.stacked()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle where the run is, and which checkpoint and lengths were opened: not the parameters."""
        if self._temporary:
            raise TypeError(
                f"{self!r} is temporary, its folder goes with it: give from_model a workdir to pickle a retriever"
            )
        tokenizer, workdir = self.run.tokenizer, os.path.abspath(self.run.workdir.path)
        step = str(self.run.checkpoint["step"])
        return _reopen, (workdir, step, tokenizer.query_length, tokenizer.passage_length)

    def __repr__(self) -> str:
        return f"Retriever({str(self.run.workdir)!r}, step {self.run.checkpoint['step']})"


@dataclass(frozen=True)
class Hit:
    """A passage of a ranking. `vectors`: for each vector of the query (nearly always one), which of the passage's has
    the highest product with it, from 0."""

    id: str
    score: float
    title: str
    text: str
    vectors: tuple[int, ...]


class Index:
    """A corpus that a retriever encoded, opened for search: exact, unless the options name an approximate index or
    candidates."""

    def __init__(self, retriever: Retriever, corpus: PathLike = "", options: SearchOptions = SearchOptions()) -> None:
        folder = corpus_folder(retriever.run.workdir, os.fspath(corpus))
        self.retriever, self._options = retriever, options
        self._searcher = Searcher(retriever.run, folder, options, many=True)

    @classmethod
    def open(
        cls, source: Retriever | PathLike, corpus: PathLike = "", options: SearchOptions = SearchOptions()
    ) -> Index:
        """Open a corpus that was encoded, by `build` or by `jaxret encode`. Every file is compared with its digest.

        On accelerators the corpus stays on all of them if it fits (of an exact search).

        Args:
            source: a retriever, or the folder of a run.
            corpus: its name, or the folder or file that was encoded; needed if there are several.
            options: how candidates are found, as `jaxret search` has its flags: SearchOptions(backend="xla",
                precision="bfloat16") takes half the memory, and the results are the same; SearchOptions(index="NAME")
                takes an index that `jaxret index` built, and SearchOptions(candidates="mean:1000") scores the passages
                that one vector each ranks highest: approximate.

        Raises:
            FileNotFoundError: there is no such corpus or index.
            ContractError: (a ValueError) another model or checkpoint encoded it.
            ShardError: (a ValueError) a file is missing or damaged.
            ValueError: candidates of passages of one vector.
        """
        return cls(source if isinstance(source, Retriever) else Retriever.open(source), corpus, options)

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
        """Encode a corpus, as `jaxret encode` does, and open it. Nothing is encoded twice.

        Args:
            retriever: encodes the passages.
            corpus: a folder or file of any format, or passages; texts alone get their number from 0 as their id, and
                all are kept beside the vectors.
            name: of the encoded corpus; default that of the folder or file, or "passages".
            encoding: how it is encoded, as EncodeOptions(on_error="skip", dtype="float16").
            options: how it is searched, as of `open`.
            progress: show progress.

        Raises:
            DataError: (a ValueError) a bad record.
            ContractError: (a ValueError) another corpus has that name.
        """
        if not isinstance(corpus, str | os.PathLike):
            name = name or "passages"
            corpus = _written(retriever.run.workdir.embeddings(name), _passages(corpus))
        encoded = encode_corpus(retriever.run, os.fspath(corpus), name, encoding, progress)
        return cls(retriever, encoded.folder.name, options)

    def __len__(self) -> int:
        """Return the number of passages."""
        return self._searcher.shards.total_rows

    def search(self, queries: Sequence[str], k: int = 10, *, texts: bool = True) -> list[list[Hit]]:
        """Return the k best passages of each question, best first; fewer, if there are no more.

        Of equal scores the one that comes first in the corpus is first. texts=False leaves titles and texts empty, and
        does not need the corpus.

        Raises ValueError for a question that is blank or no text, for k < 1 and for more passages than are candidates,
        FileNotFoundError if the corpus is no longer where it was, ContractError (a ValueError) if it was changed.
        """
        questions = [Query(str(number), text) for number, text in enumerate(_questions(queries))]
        if not questions:
            return []
        outcome = self._searcher.search(questions, k)
        rankings = [outcome.rankings[query.id] for query in questions]
        ids = {key for ranking in rankings for key, _ in ranking}
        passages = self._searcher.passages(ids) if texts else {key: Passage(key, "") for key in ids}
        best_vectors = self._searcher.best_vectors(outcome)
        return [
            [
                Hit(key, score, passages[key].title, passages[key].text, vectors)
                for (key, score), vectors in zip(ranking, of_ranking, strict=True)
            ]
            for ranking, of_ranking in zip(rankings, best_vectors, strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the retriever, the name of the corpus and the options: not the vectors."""
        return Index, (self.retriever, self._searcher.folder.name, self._options)

    def __repr__(self) -> str:
        return f"Index({str(self._searcher.folder)!r}, {len(self):,} passages, {self._searcher.description})"


def _reopen(workdir: str, checkpoint: str, query_length: int, passage_length: int) -> Retriever:
    """Open a retriever that was pickled."""
    return Retriever.open(workdir, checkpoint, query_length=query_length, passage_length=passage_length)


def _is_run(source: PathLike) -> bool:
    folder = Workdir(source)
    return folder.contract.exists() or folder.checkpoints.is_dir()


def _require_model(source: PathLike, download: bool) -> None:
    try:
        resolve_encoder(os.fspath(source), download)
    except FileNotFoundError as error:
        if download or Path(source).is_dir() or os.fspath(source).startswith("package:"):
            raise
        raise FileNotFoundError(
            f"{source} is no model's directory, and no model in the local Hugging Face cache; download=True "
            "fetches one of the hub"
        ) from error


def _questions(texts: Sequence[str]) -> list[str]:
    """Return the texts, normalised as those of files are."""

    def checked(number: int, text: str) -> str:
        try:
            return check_question(text).text
        except ValueError as error:
            raise ValueError(f"queries[{number}]: {error}") from error

    return [checked(number, text) for number, text in enumerate(_listed(texts, str, "queries"))]


def _passages(texts: Iterable[str | Passage]) -> Iterator[Passage]:
    for number, text in enumerate(_listed(texts, str | Passage, "passages")):
        passage = Passage(str(number), text) if isinstance(text, str) else text
        yield check_passage(passage, Location(Path(f"passages[{number}]")))


def _listed(texts: Any, kind: Any, what: str) -> Iterator[Any]:
    """Yield the texts, if they are a list of texts."""
    if isinstance(texts, str | bytes | Passage | Mapping):
        raise ValueError(f"{what} must be a list of texts, not one {type(texts).__name__}: put it in [ ]")
    for number, text in enumerate(texts):
        if not isinstance(text, kind):
            raise ValueError(f"{what}[{number}] is {text!r:.60}; it must be a text")
        yield text


def _written(folder: Path, passages: Iterable[Passage]) -> Path:
    """Write the passages into a folder as a file in the format of BEIR's corpora, and return it. Its name is a digest
    of its content: vectors that exist are never replaced."""
    records = ({"_id": one.id, "title": one.title, "text": one.text} for one in passages)
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if not data:
        raise ValueError("there is no passage to encode; give a list with some")
    path = folder / f"passages-{sha256_bytes(data)[:16]}.jsonl"
    if not path.exists():
        with atomic_write(path, "wb") as file:
            file.write(data)
    return path
