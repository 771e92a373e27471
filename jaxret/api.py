"""jaxret from Python: a `Retriever` turns texts into vectors, an `Index` finds the best passages. docs/python.md has
examples, which the tests run.

What is opened is kept: parameters, compiled programs, vectors, and where the text of each passage is. A text of a
length that was not there yet compiles a program, and so does a number of texts that was not (1, to 8, to 16, ...);
nothing else does after the first search.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.data.files import Where, check_passage, check_question
from jaxret.data.records import Passage, Query
from jaxret.models.encoders.pretrained import resolve
from jaxret.retrieval.approximate import Chosen
from jaxret.retrieval.encode import encode_corpus
from jaxret.retrieval.retrieve import Searcher, choose_corpus
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.shipped import changed, load
from jaxret.storage import atomic_write, sha256_bytes
from jaxret.tools.open_model import make_run
from jaxret.training.loop import train

__all__ = ["Hit", "Index", "Passage", "Retriever"]

PathLike = str | os.PathLike[str]
Vectors = np.ndarray | list[np.ndarray]


class Retriever:
    """A run that was opened: texts -> vectors."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._embed = run.embedder()

    @classmethod
    def open(
        cls,
        source: PathLike,
        checkpoint: str = "best",
        *,
        workdir: PathLike | None = None,
        token: str = "",
        normalize: bool | None = None,
        download: bool = False,
        query_length: int | None = None,
        passage_length: int | None = None,
    ) -> Retriever:
        """Opens the folder of a run at a checkpoint ("best", "last", or a step), or a model as it comes: a Hugging Face
        or sentence-transformers directory, `package:NAME/FOLDER`, or a hub name in the local cache.

        A model becomes a run in `workdir`, where it is found again; without, in a temporary folder, with everything
        that is encoded with it. token: of an encoder alone, what its vector is, "cls" or "mean"; normalize: and whether
        of length 1, for cosines. download: fetches a hub name that is not in the cache. Lengths in tokens, where they
        are to be others than in training.

        Raises FileNotFoundError if there is no such run or model, ValueError if it cannot be used here, and
        ContractError (a ValueError) if a file of the run was changed.
        """
        if not _is_run(source):
            _require_model(source, download)
            folder = workdir or mkdtemp(prefix="jaxret-")
            try:
                make_run(os.fspath(source), Path(folder), token, download, normalize, progress=False)
                found = cls(open_run(folder, checkpoint, query_length, passage_length))
            except BaseException:
                _remove(folder, workdir)
                raise
            weakref.finalize(found, _remove, folder, workdir)  # also when the process ends
            return found
        if token or normalize is not None or workdir is not None:
            raise ValueError(f"{source} is a run: it is its own workdir and says what its vectors are; leave these out")
        return cls(open_run(source, checkpoint, query_length, passage_length))

    @classmethod
    def train(
        cls,
        config: str | ConfigDict,
        workdir: PathLike,
        changes: Mapping[str, Any] | None = None,
        *,
        progress: bool = True,
    ) -> Retriever:
        """Trains as `jaxret train --config=CONFIG --workdir=WORKDIR` does, and opens the best checkpoint. The same call
        again goes on with a run that was interrupted, and opens one that is done.

        config: a name ("mlr", "minilm:dual_encoder"), a file, or what such a file gives. changes: keys and their
        values, as {"data.train": "FOLDER_OR_FILE", "train.steps": 1000}; configs/base.py explains all. Raises
        ValueError for a config that makes no sense, DataError (a ValueError) for bad records, and what
        `jaxret.training.loop.train` says.
        """
        named = isinstance(config, str)
        found = changed(load(config) if named else config, changes or {}, config if named else "this config")
        train(found, Path(workdir), progress, given=changes or {}).require_finished()
        return cls.open(workdir)

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """The vectors of questions: float32 [Q,D]; under late interaction a list of [U,D], U vectors for each. Raises
        ValueError for a question that is blank or no text."""
        found = self._embed(self.run.tokenizer.queries(_questions(queries)), "query")
        return list(found) if self.run.retriever.late_interaction else found.stacked()[:, 0]

    def encode_passages(self, passages: Sequence[str | Passage]) -> Vectors:
        """The vectors of passages: float32 [N,V,D]; a list of [V,D] where each passage has its own number. The score of
        a passage is the highest product of one of them with the query's. Raises ValueError for what is no text."""
        found = self._embed(self.run.tokenizer.passages(list(_passages(passages))), "passage")
        return list(found) if self.run.retriever.vectors_per_passage is None else found.stacked()

    def __repr__(self) -> str:
        return f"Retriever({str(self.run.workdir)!r}, step {self.run.checkpoint['step']})"


@dataclass(frozen=True)
class Hit:
    """A passage that was found. `vectors`: for each vector of the query (nearly always one), which of the passage's has
    the highest product with it, from 0."""

    id: str
    score: float
    title: str
    text: str
    vectors: tuple[int, ...]


class Index:
    """A corpus that a retriever encoded, opened for search: exact, unless an approximate index or candidates are asked
    for."""

    def __init__(
        self,
        retriever: Retriever,
        corpus: PathLike = "",
        backend: str = "auto",
        precision: str = "float32",
        approximate: str = "",
        candidates: str = "",
    ) -> None:
        folder = choose_corpus(retriever.run, os.fspath(corpus))
        chosen = Chosen(approximate) if approximate else None
        self.retriever = retriever
        self._searcher = Searcher(
            retriever.run, folder, backend, many=True, precision=precision, candidates=candidates, index=chosen
        )

    @classmethod
    def open(
        cls,
        source: Retriever | PathLike,
        corpus: PathLike = "",
        *,
        backend: str = "auto",
        precision: str = "float32",
        approximate: str = "",
        candidates: str = "",
    ) -> Index:
        """Opens a corpus that was encoded, by `build` or by `jaxret encode`: of a retriever, or of a run's folder.
        Every file is compared with its digest.

        corpus: its name, or the folder or file that was encoded; needed if there are several. backend: "auto",
        "faiss-gpu", "faiss-cpu" or "xla"; precision: "float32", or with XLA "float16", "bfloat16" or "int8", in which
        candidates take half or a quarter of the memory: what is found is the same. approximate: the name of an index
        that `jaxret index` built: it finds candidates, which are scored exactly; what it does not find is missing, and
        backend and precision cannot be chosen. candidates: of passages of several vectors, which of them are scored: as
        "mean:1000" or "muvera:1000", those that one vector each ranks highest. On accelerators the corpus stays on all
        of them if it fits (of an exact search). Raises FileNotFoundError if there is no such corpus or index,
        ContractError (a ValueError) if another model or checkpoint encoded it, ShardError (a ValueError) for a file
        that is missing or damaged, ValueError for candidates of passages of one vector, or beside an index.
        """
        retriever = source if isinstance(source, Retriever) else Retriever.open(source)
        return cls(retriever, corpus, backend, precision, approximate, candidates)

    @classmethod
    def build(
        cls,
        retriever: Retriever,
        corpus: PathLike | Iterable[str | Passage],
        name: str = "",
        *,
        backend: str = "auto",
        precision: str = "float32",
        progress: bool = True,
        **options: Any,
    ) -> Index:
        """Encodes a corpus as `jaxret encode` does and opens it; what is encoded already is not encoded again.

        corpus: a folder or file of any format, or passages; texts alone get their number from 0 as their id, and all
        are kept beside the vectors. name: of the corpus, default that of the folder or file, or "passages". options:
        those of `jaxret.retrieval.encode.encode_corpus`, as on_error="skip" or dtype="float16". Raises DataError (a
        ValueError) for a bad record, ContractError (a ValueError) if another corpus has that name.
        """
        if not isinstance(corpus, str | os.PathLike):
            name = name or "passages"
            corpus = _written(retriever.run.workdir.embeddings(name), _passages(corpus))
        found = encode_corpus(retriever.run, os.fspath(corpus), name, progress=progress, **options)
        return cls(retriever, found.folder.name, backend, precision)

    def __len__(self) -> int:
        """How many passages there are."""
        return self._searcher.shards.total_rows

    def search(self, queries: Sequence[str], k: int = 10, *, texts: bool = True) -> list[list[Hit]]:
        """The k best passages of each question, best first; fewer, if there are no more. Of equal scores the one that
        comes first in the corpus is first. texts=False leaves titles and texts empty, and does not need the corpus.

        Raises ValueError for a question that is blank or no text, for k < 1 and for more passages than are candidates,
        FileNotFoundError if the corpus is no longer where it was, ContractError (a ValueError) if it is another now.
        """
        asked = [Query(str(number), text) for number, text in enumerate(_questions(queries))]
        if not asked:
            return []
        found = self._searcher.search(asked, k)
        rankings = [found.rankings[query.id] for query in asked]
        ids = {key for ranking in rankings for key, _ in ranking}
        passages = self._searcher.passages(ids) if texts else {key: Passage(key, "") for key in ids}
        won = self._searcher.winners(found)
        return [
            [
                Hit(key, score, passages[key].title, passages[key].text, vectors)
                for (key, score), vectors in zip(ranking, winners, strict=True)
            ]
            for ranking, winners in zip(rankings, won, strict=True)
        ]

    def __repr__(self) -> str:
        return f"Index({str(self._searcher.folder)!r}, {len(self):,} passages, {self._searcher.description})"


def _is_run(source: PathLike) -> bool:
    folder = Workdir(source)
    return folder.contract.exists() or folder.checkpoints.is_dir()


def _remove(folder: PathLike, workdir: PathLike | None) -> None:
    """Removes the folder of a run that nobody gave a workdir."""
    if workdir is None:
        shutil.rmtree(folder, ignore_errors=True)


def _require_model(source: PathLike, download: bool) -> None:
    try:
        resolve(os.fspath(source), download)
    except FileNotFoundError as error:
        if download or Path(source).is_dir() or os.fspath(source).startswith("package:"):
            raise
        raise FileNotFoundError(
            f"{source} is no run, no model's directory, and no model in the local Hugging Face cache; download=True "
            "fetches one of the hub"
        ) from error


def _questions(texts: Sequence[str]) -> list[str]:
    """The texts, normalised as those of files are."""

    def checked(number: int, text: str) -> str:
        try:
            return check_question(text).text
        except ValueError as error:
            raise ValueError(f"queries[{number}]: {error}") from error

    return [checked(number, text) for number, text in enumerate(_listed(texts, str, "queries"))]


def _passages(texts: Iterable[str | Passage]) -> Iterator[Passage]:
    for number, text in enumerate(_listed(texts, str | Passage, "passages")):
        passage = Passage(str(number), text) if isinstance(text, str) else text
        yield check_passage(passage, Where(Path(f"passages[{number}]")))


def _listed(texts: Any, kind: Any, what: str) -> Iterator[Any]:
    """The texts, if they are several and of a kind."""
    if isinstance(texts, str | bytes | Passage | Mapping):
        raise ValueError(f"{what} must be a list of texts, not one {type(texts).__name__}: put it in [ ]")
    for number, text in enumerate(texts):
        if not isinstance(text, kind):
            raise ValueError(f"{what}[{number}] is {text!r:.60}; it must be a text")
        yield text


def _written(folder: Path, passages: Iterable[Passage]) -> Path:
    """The passages as a file in a folder, in the format of BEIR's corpora. It is called after its content: that of
    vectors that are there already is never replaced."""
    records = ({"_id": one.id, "title": one.title, "text": one.text} for one in passages)
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if not data:
        raise ValueError("there is no passage to encode; give a list with some")
    path = folder / f"passages-{sha256_bytes(data)[:16]}.jsonl"
    if not path.exists():
        with atomic_write(path, "wb") as file:
            file.write(data)
    return path
