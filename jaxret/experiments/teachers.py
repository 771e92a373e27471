"""Teachers that score training data: a cross-encoder, or a retriever that encoded the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxret.data.errors import Policy
from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.records import Passage, Query
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.passages import unchanged_corpus
from jaxret.mining.filters import normalized_text
from jaxret.mining.pools import RunPool, is_run_folder, require_encoded
from jaxret.models.cross_encoder import read_cross_encoder
from jaxret.models.encoders.pretrained import model_files, resolve_encoder
from jaxret.runs.reranker import open_pretrained_reranker, open_reranker
from jaxret.runs.run import USES, choose_checkpoint, open_checkpoints, stored_config
from jaxret.runs.scorer import OnProgress, ignore_progress
from jaxret.runs.workdir import Workdir

_QUERIES_PER_BLOCK = 256  # queries whose passages have their vectors in memory at the same time
_SAMPLE_SIZE = 1000  # number of passages whose texts are compared with the encoded corpus


@runtime_checkable
class TeacherScorer(Protocol):
    """Returns scores of (query id, passage id) pairs, float32 [N]. `on_progress` gets the number of pairs of each
    block."""

    @property
    def cut(self) -> tuple[Truncation, ...]:
        """Counts of the texts that the length limits cut."""
        ...

    def __call__(self, pairs: Sequence[tuple[str, str]], on_progress: OnProgress = ignore_progress) -> np.ndarray: ...


@runtime_checkable
class TeacherModel(Protocol):
    """A model that scores pairs. `scorer_of` takes queries and passages by id and returns a scorer of pairs."""

    def scorer_of(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> TeacherScorer: ...


class RetrieverTeacher:
    """A retriever as teacher. It scores passages of a corpus that it encoded, with the scores of its search."""

    def __init__(self, workdir: str, encoded_name: str) -> None:
        self.workdir, self.encoded_name = workdir, encoded_name

    def scorer_of(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> RetrieverScorer:
        """Return the scorer.

        Raises:
            ValueError: passages are not in the corpus, or have other texts in it.
            FileNotFoundError: the source of the encoded corpus was moved, so texts cannot be compared.
            ContractError: the source of the encoded corpus has changed.
        """
        pool = RunPool(self.workdir, self.encoded_name, set(passages))
        _require_no_missing(self.workdir, pool.missing(passages))
        sample = dict(islice(passages.items(), _SAMPLE_SIZE))
        _require_same_texts(self.workdir, sample, pool.searcher.texts.read(sample.keys()))
        return RetrieverScorer(pool, queries)


def require_passages(teacher: str, data: TrainingSource, corpora: Iterable[Corpus], policy: Policy) -> None:
    """Raise ValueError if a retriever that encodes corpora cannot score training records with texts. It looks at the
    first records: their passages must be in the corpora, with the same texts.

    Args:
        teacher: name of the retriever, for the error.
        data: the records. Judgements and records with ids instead of texts are not read.
        corpora: the corpora, which are read until all passages of the first records have been found.
        policy: what to do with bad records.
    """
    passages: dict[str, Passage] = {}
    for example in data.stream(policy):
        passages |= {passage.id: passage for passage in (*example.positives, *example.negatives)}
        if len(passages) >= _SAMPLE_SIZE:
            break
    corpus_passages: dict[str, Passage] = {}
    for _, passage in chain.from_iterable(corpus.read_located() for corpus in corpora):
        if len(corpus_passages) == len(passages):
            break
        if passage.id in passages:
            corpus_passages.setdefault(passage.id, passage)
    _require_no_missing(teacher, [key for key in passages if key not in corpus_passages])
    _require_same_texts(teacher, passages, corpus_passages)


def _require_no_missing(teacher: str, ids: Sequence[str]) -> None:
    """Raise ValueError if there are `ids`, which are passages that the corpus of a teacher does not have."""
    if ids:
        raise ValueError(
            f"{teacher} cannot score passage {ids[0]!r}, one of {len(ids):,} that are not in the corpus that it "
            "encodes; encode the corpus of the training data"
        )


def _require_same_texts(teacher: str, passages: Mapping[str, Passage], corpus_passages: Mapping[str, Passage]) -> None:
    """Raise ValueError if most of the passages have other texts in the corpus of a teacher.

    Ids may be row numbers, which another corpus also has. A few texts may differ, because some positives of DPR's files
    are not exactly its passages.

    Args:
        teacher: name of the teacher, for the error.
        passages: passages of the training data.
        corpus_passages: passages of the corpus with the same ids.
    """
    different = [key for key, passage in passages.items() if not _is_contained(passage.text, corpus_passages[key].text)]
    if 2 * len(different) > len(passages):
        text, encoded_text = (source[different[0]].text[:60] for source in (passages, corpus_passages))
        raise ValueError(
            f"{teacher} scores by ids, but {len(different):,} of {len(passages):,} passages of the training data have "
            f"other texts in the corpus that it encodes: {different[0]!r} is {text!r} in the training data and "
            f"{encoded_text!r} in the corpus. Encode the corpus of the training data"
        )


def _is_contained(first: str, second: str) -> bool:
    """Return whether one of two texts contains the other. A text may have the title in front, be cut, or be empty."""
    first, second = normalized_text(first), normalized_text(second)
    return first in second or second in first


@dataclass(frozen=True)
class RetrieverScorer:
    """Returns the scores of a run's search."""

    pool: RunPool  # vectors of the passages
    queries: Mapping[str, Query]  # query id -> query
    cut: tuple[Truncation, ...] = ()  # empty: passages were cut when the corpus was encoded

    def __call__(self, pairs: Sequence[tuple[str, str]], on_progress: OnProgress = ignore_progress) -> np.ndarray:
        passages_of: dict[str, list[str]] = {}
        for query, passage in pairs:
            passages_of.setdefault(query, []).append(passage)
        scores: dict[tuple[str, str], float] = {}
        for start in range(0, len(passages_of), _QUERIES_PER_BLOCK):
            block = list(passages_of)[start : start + _QUERIES_PER_BLOCK]
            queries, passages = [self.queries[query] for query in block], [passages_of[query] for query in block]
            block_scores = self.pool.scores(queries, passages)
            on_progress(sum(len(passages_of[query]) for query in block))
            for query, passage_scores in zip(block, block_scores, strict=True):
                scores |= {(query, passage): score for passage, score in passage_scores.items()}
        return np.array([scores[pair] for pair in pairs], np.float32)


def open_teacher(name: str, encoded_name: str) -> TeacherModel:
    """Open a teacher.

    Args:
        name: folder of a run (retriever or cross-encoder), or a cross-encoder in transformers' files.
        encoded_name: name of the encoded corpus, for a retriever.
    """
    if not is_run_folder(name):
        return open_pretrained_reranker(name)
    return open_reranker(name) if _task(name) == "reranking" else RetrieverTeacher(name, encoded_name)


def check_teacher(name: str, encoded_name: str, texts: Corpus | TrainingSource, policy: Policy) -> None:
    """Raise an error if a teacher cannot score data. Weights are not loaded.

    Args:
        name: folder of a run, or a cross-encoder in transformers' files.
        encoded_name: name of the encoded corpus, for a retriever.
        texts: corpus of the data to score, or the training records if they contain texts.
        policy: what to do with bad records.
    Raises:
        FileNotFoundError: the teacher or its encoded corpus is missing.
        ValueError: the run is neither a retriever nor a cross-encoder, or it encoded other texts than the records have.
        ContractError: the retriever encoded another corpus, or its corpus has changed.
    """
    if not is_run_folder(name):
        try:
            read_cross_encoder(resolve_encoder(name))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the teacher {name!r} is not a stage, a run or a model: {error}") from error
        return
    folder, config = Workdir(name), stored_config(Workdir(name))
    if config.task not in ("retrieval", "reranking"):
        raise ValueError(f"the teacher {name!r} is {USES.get(config.task, config.task)}, which gives no scores")
    with open_checkpoints(folder, config) as checkpoints:
        choose_checkpoint(checkpoints, "best", folder)
    if config.task == "reranking":
        return
    encoded_corpus = open_encoded(corpus_folder(folder, encoded_name), verify=False)
    if isinstance(texts, Corpus):
        remedy = f"encode it with the teacher (jaxret encode --workdir={folder} --name=...), or use that corpus"
        require_encoded(encoded_corpus, texts, texts.scan().sha256, remedy)
    else:  # the last text of an id belongs to its vector
        corpora = (unchanged_corpus(shards.folder) for shards in reversed(encoded_corpus.shards))
        require_passages(f"the teacher {name!r}", texts, corpora, policy)


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
