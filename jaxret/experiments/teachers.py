"""Teachers that score training data: a cross-encoder, or a retriever that encoded the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxret.data.errors import Policy
from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.records import Passage, Query
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.index.corpus_folder import corpus_folder
from jaxret.index.encoded_corpus import open_encoded
from jaxret.mining.filters import normalized_text
from jaxret.mining.pools import RunPool, is_run_folder, require_encoded
from jaxret.models.cross_encoder import read_cross_encoder
from jaxret.models.encoders.pretrained import model_files, resolve_encoder
from jaxret.runs.reranker import open_pretrained_reranker, open_reranker
from jaxret.runs.run import USES, choose_checkpoint, open_checkpoints, stored_config
from jaxret.runs.scorer import OnProgress, ignore_progress
from jaxret.runs.workdir import Workdir

_QUERIES_PER_BLOCK = 256  # the vectors of their passages are in memory
_COMPARED = 1000  # passages whose texts are compared with those of the encoded corpus


@runtime_checkable
class TeacherScorer(Protocol):
    """Scores of (query id, passage id) pairs, float32 [N]. `on_progress` gets the number of pairs of each block.

    Attributes:
        cut: how many texts the length limits cut.
    """

    @property
    def cut(self) -> tuple[Truncation, ...]: ...

    def __call__(self, pairs: Sequence[tuple[str, str]], on_progress: OnProgress = ignore_progress) -> np.ndarray: ...


@runtime_checkable
class TeacherModel(Protocol):
    """A model that scores pairs. `scorer_of` takes queries and passages by id and returns a scorer of pairs."""

    def scorer_of(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> TeacherScorer: ...


class RetrieverTeacher:
    """A run as teacher: the scores of its search, for passages of a corpus that it encoded."""

    def __init__(self, workdir: str, encoded_name: str) -> None:
        self.workdir, self.encoded_name = workdir, encoded_name

    def scorer_of(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> RetrieverScorer:
        """Return the scorer.

        Raises:
            ValueError: passages are not in the corpus, or are other texts there.
            FileNotFoundError: the corpus that was encoded was moved, so that texts cannot be compared.
            ContractError: it was changed.
        """
        pool = RunPool(self.workdir, self.encoded_name, set(passages))
        _require_no_missing(self.workdir, pool.missing(passages))
        first = dict(islice(passages.items(), _COMPARED))
        _require_same_texts(self.workdir, first, pool.searcher.passages(first.keys()))
        return RetrieverScorer(pool, queries)


def require_passages(teacher: str, data: TrainingSource, corpus: Corpus, policy: Policy) -> None:
    """Raise ValueError if a retriever that will encode a corpus cannot score records with texts, by the first ones:
    they name passages that the corpus has not, or has with other texts.

    Args:
        teacher: name of the retriever, for the error.
        data: the records; of judgements, and of records of ids, nothing is read.
        corpus: read until it had the passages.
        policy: for bad records.
    """
    passages: dict[str, Passage] = {}
    for example in data.stream(policy):
        passages |= {passage.id: passage for passage in (*example.positives, *example.negatives)}
        if len(passages) >= _COMPARED:
            break
    corpus_passages: dict[str, Passage] = {}
    for _, passage in corpus.read_located():
        if len(corpus_passages) == len(passages):
            break
        if passage.id in passages:
            corpus_passages.setdefault(passage.id, passage)
    _require_no_missing(teacher, [key for key in passages if key not in corpus_passages])
    _require_same_texts(teacher, passages, corpus_passages)


def _require_no_missing(teacher: str, ids: Sequence[str]) -> None:
    """Raise ValueError for ids of passages that the corpus of a teacher has not."""
    if ids:
        raise ValueError(
            f"{teacher} cannot score passage {ids[0]!r}, one of {len(ids):,} that are not in the corpus that it "
            "encodes; encode the one that the training data are of"
        )


def _require_same_texts(teacher: str, passages: Mapping[str, Passage], corpus_passages: Mapping[str, Passage]) -> None:
    """Raise ValueError if most of the passages are other texts in the corpus of a teacher.

    Ids may be row numbers, which another corpus has, too. A few texts may differ: positives of DPR's files are not
    always, to the letter, what its passages are.

    Args:
        teacher: for the error.
        passages: of the training data.
        corpus_passages: of the corpus, those of the same ids.
    """
    others = [key for key, one in passages.items() if not _contains_other(one.text, corpus_passages[key].text)]
    if 2 * len(others) > len(passages):
        text, encoded_text = (source[others[0]].text[:60] for source in (passages, corpus_passages))
        raise ValueError(
            f"{teacher} scores by ids, and {len(others):,} of {len(passages):,} passages are other texts in the corpus "
            f"that it encodes: {others[0]!r} is {encoded_text!r} there, and {text!r} in the training data; encode the "
            "corpus that the training data are of"
        )


def _contains_other(one: str, other: str) -> bool:
    """Return whether a text contains the other: one may have the title in front, be cut, or be absent."""
    one, other = normalized_text(one), normalized_text(other)
    return one in other or other in one


@dataclass(frozen=True)
class RetrieverScorer:
    """Scores of a run's search. `pool` has the vectors of the passages."""

    pool: RunPool
    queries: Mapping[str, Query]
    cut: tuple[Truncation, ...] = ()

    def __call__(self, pairs: Sequence[tuple[str, str]], on_progress: OnProgress = ignore_progress) -> np.ndarray:
        passages_of: dict[str, list[str]] = {}
        for query, passage in pairs:
            passages_of.setdefault(query, []).append(passage)
        scores: dict[tuple[str, str], float] = {}
        for start in range(0, len(passages_of), _QUERIES_PER_BLOCK):
            block = list(passages_of)[start : start + _QUERIES_PER_BLOCK]
            block_scores = self.pool.scores(
                [self.queries[query] for query in block], [passages_of[query] for query in block]
            )
            on_progress(sum(len(passages_of[query]) for query in block))
            for query, passage_scores in zip(block, block_scores, strict=True):
                scores |= {(query, passage): score for passage, score in passage_scores.items()}
        return np.array([scores[pair] for pair in pairs], np.float32)


def open_teacher(name: str, encoded_name: str) -> TeacherModel:
    """Open a teacher.

    name: folder of a run (retriever or cross-encoder), or a cross-encoder in transformers' files.
    encoded_name: name of the encoded corpus, for a retriever.
    """
    if not is_run_folder(name):
        return open_pretrained_reranker(name)
    return open_reranker(name) if _task(name) == "reranking" else RetrieverTeacher(name, encoded_name)


def check_teacher(name: str, encoded_name: str, corpus: Corpus | None) -> None:
    """Check a teacher without loading weights.

    Args:
        name, encoded_name: see `open_teacher`.
        corpus: of the data to score; None if the data have their texts with them.
    Raises:
        FileNotFoundError: the teacher or its encoded corpus is missing.
        ValueError: the run is neither a retriever nor a cross-encoder.
        ContractError: the retriever encoded another corpus.
    """
    if not is_run_folder(name):
        try:
            read_cross_encoder(resolve_encoder(name))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the teacher {name!r} is not a stage, a run or a model: {error}") from error
        return
    folder, config = Workdir(name), stored_config(Workdir(name))
    if config.task not in ("retrieval", "reranking"):
        raise ValueError(f"the teacher {name!r} is {USES.get(config.task, config.task)}; it scores nothing")
    with open_checkpoints(folder, config) as checkpoints:
        choose_checkpoint(checkpoints, "best", folder)
    if config.task == "retrieval":
        encoded_corpus = open_encoded(corpus_folder(folder, encoded_name), verify=False)
        if corpus:
            remedy = f"encode it with the teacher (jaxret encode --workdir={folder} --name=...), or use that corpus"
            require_encoded(encoded_corpus, corpus, corpus.scan().sha256, remedy)


def teacher_files(name: str, encoded_name: str) -> list[Path]:
    """Return the files on this machine that a teacher's scores depend on."""
    if not is_run_folder(name):
        return model_files(name)
    folder = Workdir(name)
    files = [folder.config, folder.contract, *sorted(folder.checkpoints.glob("*/_CHECKPOINT_METADATA"))]
    if _task(name) == "retrieval":
        files += sorted(corpus_folder(folder, encoded_name).rglob("manifest.json"))
    return files


def _task(run: str) -> str:
    return stored_config(Workdir(run)).task
