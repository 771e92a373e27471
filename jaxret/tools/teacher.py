"""Who scores training data: a cross-encoder, or a retriever that encoded the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxret.data.records import Passage, Query
from jaxret.data.tokenizer import Truncation
from jaxret.mining.pools import RunPool, is_run
from jaxret.models.encoders.pretrained import model_files, resolve
from jaxret.retrieval.retrieve import corpus_folder
from jaxret.runs.reranker import open_reranker, open_stock
from jaxret.runs.run import stored_config
from jaxret.runs.workdir import Workdir

_AT_ONCE = 256  # queries, whose passages' vectors are in memory


@runtime_checkable
class Scorer(Protocol):
    """Scores, float32 [N], of pairs of ids of queries and passages; and what length limits cost."""

    def __call__(
        self,
        queries: Mapping[str, Query],
        passages: Mapping[str, Passage],
        pairs: Sequence[tuple[str, str]],
        progress: bool = False,
    ) -> tuple[np.ndarray, tuple[Truncation, ...]]: ...


class ByRetriever:
    """A run's own scores, as its search has them, of passages in a corpus that it encoded."""

    def __init__(self, workdir: str, corpus: str) -> None:
        self.workdir, self.corpus = workdir, corpus

    def __call__(
        self,
        queries: Mapping[str, Query],
        passages: Mapping[str, Passage],
        pairs: Sequence[tuple[str, str]],
        progress: bool = False,
    ) -> tuple[np.ndarray, tuple[Truncation, ...]]:
        """Raises ValueError for a passage that the corpus does not have."""
        pool, wanted = RunPool(self.workdir, self.corpus, set(passages)), dict[str, list[str]]()
        for query, passage in pairs:
            wanted.setdefault(query, []).append(passage)
        scores: dict[tuple[str, str], float] = {}
        for start in range(0, len(wanted), _AT_ONCE):
            block = list(wanted)[start : start + _AT_ONCE]
            known = pool.scores([queries[query] for query in block], [wanted[query] for query in block])
            for query, found in zip(block, known, strict=True):
                scores |= {(query, passage): score for passage, score in found.items()}
        if missing := [passage for query, passage in pairs if (query, passage) not in scores]:
            raise ValueError(
                f"{self.workdir} cannot score passage {missing[0]!r}: it is not in the corpus that it encoded; "
                "encode the one that the training data are of"
            )
        return np.array([scores[pair] for pair in pairs], np.float32), ()


def open_teacher(name: str, corpus: str) -> Scorer:
    """name: the folder of a run, of either task, or a cross-encoder in transformers' files. corpus: the name of the
    encoded one, of a retriever."""
    if not is_run(name):
        return open_stock(name)
    return open_reranker(name) if _task(name) == "reranking" else ByRetriever(name, corpus)


def check_teacher(name: str, corpus: str) -> None:
    """Raises FileNotFoundError for a teacher, or a corpus of it, that is not there; nothing is loaded."""
    if not is_run(name):
        try:
            resolve(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the teacher {name!r} is no stage, no run, and no model: {error}") from error
    elif _task(name) == "retrieval":
        corpus_folder(Workdir(name), corpus)


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
