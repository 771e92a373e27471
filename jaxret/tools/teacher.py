"""Who scores training data: a cross-encoder, or a retriever that encoded the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxret.data.formats import scan_corpus
from jaxret.data.records import Passage, Query
from jaxret.data.tokenizer import Truncation
from jaxret.mining.pools import RunPool, is_run, require_encoded
from jaxret.models.cross_encoder import read_cross_encoder
from jaxret.models.encoders.pretrained import model_files, resolve
from jaxret.retrieval.encoded import open_encoded
from jaxret.retrieval.retrieve import corpus_folder
from jaxret.runs.reranker import open_reranker, open_stock
from jaxret.runs.run import USES, choose_checkpoint, open_checkpoints, stored_config
from jaxret.runs.scorer import Done, untold
from jaxret.runs.workdir import Workdir

_AT_ONCE = 256  # queries, whose passages' vectors are in memory


@runtime_checkable
class PairScores(Protocol):
    """Scores, float32 [N], of pairs of ids of queries and passages that are at hand. cut: what length limits cost.
    done: is told as they come."""

    @property
    def cut(self) -> tuple[Truncation, ...]: ...

    def __call__(self, pairs: Sequence[tuple[str, str]], done: Done = untold) -> np.ndarray: ...


@runtime_checkable
class Scorer(Protocol):
    """Takes queries and passages in hand, by their ids, so that pairs of them can be scored, some at a time."""

    def over(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> PairScores: ...


class ByRetriever:
    """A run's own scores, as its search has them, of passages in a corpus that it encoded."""

    def __init__(self, workdir: str, corpus: str) -> None:
        self.workdir, self.corpus = workdir, corpus

    def over(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> RetrieverScores:
        """Raises ValueError for passages that the corpus does not have."""
        pool = RunPool(self.workdir, self.corpus, set(passages))
        if missing := pool.without(passages):
            raise ValueError(
                f"{self.workdir} cannot score passage {missing[0]!r}, one of {len(missing):,} that are not in the "
                "corpus that it encoded; encode the one that the training data are of"
            )
        return RetrieverScores(pool, queries)


@dataclass(frozen=True)
class RetrieverScores:
    """Those of a run."""

    pool: RunPool
    queries: Mapping[str, Query]
    cut: tuple[Truncation, ...] = ()

    def __call__(self, pairs: Sequence[tuple[str, str]], done: Done = untold) -> np.ndarray:
        wanted: dict[str, list[str]] = {}
        for query, passage in pairs:
            wanted.setdefault(query, []).append(passage)
        scores: dict[tuple[str, str], float] = {}
        for start in range(0, len(wanted), _AT_ONCE):
            block = list(wanted)[start : start + _AT_ONCE]
            known = self.pool.scores([self.queries[query] for query in block], [wanted[query] for query in block])
            done(sum(len(wanted[query]) for query in block))
            for query, found in zip(block, known, strict=True):
                scores |= {(query, passage): score for passage, score in found.items()}
        return np.array([scores[pair] for pair in pairs], np.float32)


def open_teacher(name: str, corpus: str) -> Scorer:
    """name: the folder of a run, of either task, or a cross-encoder in transformers' files. corpus: the name of the
    encoded one, of a retriever."""
    if not is_run(name):
        return open_stock(name)
    return open_reranker(name) if _task(name) == "reranking" else ByRetriever(name, corpus)


def check_teacher(name: str, corpus: str, texts: str) -> None:
    """Raises for a teacher, or a corpus of it, that is not there or of no use; no weights are loaded. texts: the corpus
    of the data that it is to score, "" if these have texts of their own. Raises FileNotFoundError, ValueError for what
    scores nothing, and ContractError if a retriever encoded another corpus."""
    if not is_run(name):
        try:
            read_cross_encoder(resolve(name))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the teacher {name!r} is no stage, no run, and no model: {error}") from error
        return
    folder, config = Workdir(name), stored_config(Workdir(name))
    if config.task not in ("retrieval", "reranking"):
        raise ValueError(f"the teacher {name!r} is {USES.get(config.task, config.task)}; it scores nothing")
    with open_checkpoints(folder, config) as checkpoints:
        choose_checkpoint(checkpoints, "best", folder)
    if config.task == "retrieval":
        encoded = open_encoded(corpus_folder(folder, corpus), verify=False)
        if texts:
            remedy = f"encode it with the teacher (jaxret encode --workdir={folder} --name=...), or use that corpus"
            require_encoded(encoded, texts, scan_corpus(texts).sha256, remedy)


def teacher_files(name: str, corpus: str) -> list[Path]:
    """The files that a teacher's scores depend on, where they are on this machine."""
    if not is_run(name):
        return model_files(name)
    folder = Workdir(name)
    found = [folder.config, folder.contract, *sorted(folder.checkpoints.glob("*/_CHECKPOINT_METADATA"))]
    if _task(name) == "retrieval":
        found += sorted(corpus_folder(folder, corpus).rglob("manifest.json"))
    return found


def _task(run: str) -> str:
    return stored_config(Workdir(run)).task
