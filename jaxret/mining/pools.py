"""Where candidates come from: BM25, a run that encoded the corpus, or a file of rankings. Each also scores passages
that it did not retrieve, as far as it can: a margin needs the positive's score, by whoever scored the candidates."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxret.contract import ContractError
from jaxret.data.files import Policy, Where
from jaxret.data.formats.readers import found_run, run_files, run_lines
from jaxret.data.formats.trec import ranked
from jaxret.data.records import Passage, Query, Ranking
from jaxret.evaluation.bm25 import BM25
from jaxret.retrieval.encoded import EncodedCorpus
from jaxret.retrieval.retrieve import Searcher, corpus_folder
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage import sha256_file
from jaxret.types import Ragged

BM25_NAME = "bm25"
K1, B = 0.9, 0.4


class Found(NamedTuple):
    """What a pool has for a query."""

    ranking: Ranking  # best first
    positives: dict[str, float]  # the scores of its positives, as far as the pool knows them


@runtime_checkable
class Pool(Protocol):
    """bounded: whether scores are at most 1 (cosines), so that a part of one means something; None: nobody knows."""

    name: str
    bounded: bool | None

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[Found]: ...
    def parent(self) -> dict[str, Any]:
        """What it is, with digests (JSON)."""
        ...


class WordPool:
    """BM25 over a corpus, which it holds in memory."""

    bounded: bool | None = False

    def __init__(self, passages: Iterable[Passage], progress: bool) -> None:
        self.name = BM25_NAME
        self._index = BM25(list(passages), K1, B, progress)

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[Found]:
        rankings = self._index.search(queries, depth)
        found = []
        for query, ids in zip(queries, positives, strict=True):
            known = dict(rankings[query.id])
            missing = [key for key in ids if key not in known]
            scores = {key: known[key] for key in ids if key in known} | self._index.scores(query, missing)
            found.append(Found(rankings[query.id], scores))
        return found

    def parent(self) -> dict[str, Any]:
        return {"pool": BM25_NAME, "k1": K1, "b": B}


class RunPool:
    """A run's own exact search of a corpus that it encoded. It holds the ids of the corpus, its vectors if they are
    few (`retrieval/kept.py`), and of the queries that it ranks at a time all vectors: late interaction, all tokens."""

    def __init__(self, workdir: str, corpus: str, positives: set[str], backend: str = "auto") -> None:
        """corpus: the name of the encoded corpus, "" for the only one. positives: ids that will be asked for."""
        run = open_run(workdir)
        self.name = run.workdir.name
        self.bounded: bool | None = bool(run.config.normalize)
        self.searcher = Searcher(run, corpus_folder(run.workdir, corpus, "--encoded"), backend, many=True)
        self._rows: dict[str, int] = {}
        for first, ids in self.searcher.shards.id_blocks():
            self._rows |= {key: row for row, key in enumerate(ids, first) if key in positives}

    def require_corpus(self, corpus: str, sha256: str) -> None:
        """Raises ContractError if texts are to be read from another file than was encoded."""
        require_encoded(self.searcher.shards, corpus, sha256, "give that, or leave the corpus out")

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[Found]:
        found = self.searcher.search(queries, depth)
        known = self._known(found.vectors, positives)
        return [Found(found.rankings[query.id], mine) for query, mine in zip(queries, known, strict=True)]

    def scores(self, queries: Sequence[Query], passages: Sequence[Sequence[str]]) -> list[dict[str, float]]:
        """Of each query the scores of some passages, as search has them, but for those that the corpus lacks; nothing
        is searched."""
        return self._known(self.searcher.encode(queries)[1], passages)

    def without(self, passages: Iterable[str]) -> list[str]:
        """Those that the corpus lacks, of the ids that it was opened for."""
        return [key for key in passages if key not in self._rows]

    def _known(self, vectors: Ragged, passages: Sequence[Sequence[str]]) -> list[dict[str, float]]:
        there = [[key for key in ids if key in self._rows] for ids in passages]
        scores = self.searcher.scores(vectors, [[self._rows[key] for key in ids] for ids in there])
        return [dict(zip(*both, strict=True)) for both in zip(there, scores, strict=True)]

    def parent(self) -> dict[str, Any]:
        run, shards = self.searcher.run, self.searcher.shards
        return {"pool": str(run.workdir), "checkpoint": run.checkpoint, "corpus": shards.corpus}


class FilePool:
    """A file of rankings, of any format. It is read once, into a temporary file, a query's ranking a line: one is in
    memory at a time, in whatever order queries are asked for. A positive that is not in its query's ranking scores
    -inf: below all that are. Of ranks alone the scores are NaN."""

    bounded: bool | None = None

    def __init__(self, source: str, policy: Policy) -> None:
        """Raises DataError for bad records, and for a query whose lines are in two places."""
        self.name, self._source = source, source
        self.ranks_alone = found_run(source).format.ranks_alone
        self._places: dict[str, int] = {}
        self._texts: dict[str, str] = {}  # of queries, where the format has them: those without ids are row numbers
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the pool)
        for query, lines in groupby(run_lines(source, policy), key=lambda line: line.query_id):
            found = ranked(lines, policy)[query]
            if query in self._places:
                told = f"the lines of query {query!r} are not together"
                raise Where(Path(source), found[0].where.line).error("scattered query", told, "sort them by query")
            self._places[query] = self._file.tell()
            if found[0].query_text:
                self._texts[query] = found[0].query_text
            scored = [[line.passage_id, math.nan if self.ranks_alone else line.score] for line in found]
            self._file.write(json.dumps(scored).encode() + b"\n")

    def require_some(self, queries: Sequence[Query], data: str) -> None:
        """Raises ValueError if it has none of the training queries, or, where it has their texts, others."""
        known = [query for query in queries if query.id in self._places]
        if not known:
            raise ValueError(
                f"{self._source} ranks none of the {len(queries):,} queries of {data} (as {queries[0].id!r}); give the "
                "results of a search for these"
            )
        for query in known:
            if query.id in self._texts and self._texts[query.id] != query.text:
                raise ValueError(
                    f"{self._source}: its query {query.id} is {self._texts[query.id][:60]!r}, but that of {data} is "
                    f"{query.text[:60]!r}: both count their rows; give the results of a search for these queries"
                )

    def ranking(self, query: str) -> list[tuple[str, float]]:
        """Of a query, best first; empty if it has none."""
        if query not in self._places:
            return []
        self._file.seek(self._places[query])
        return [(key, score) for key, score in json.loads(self._file.readline())]

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[Found]:
        found = []
        for query, ids in zip(queries, positives, strict=True):
            ranking = self.ranking(query.id)
            known = dict(ranking)
            found.append(Found(ranking[:depth], {key: known.get(key, -math.inf) for key in ids}))
        return found

    def parent(self) -> dict[str, Any]:
        return {"pool": self._source, "files": {str(path): sha256_file(path) for path in run_files(self._source)}}


def require_encoded(encoded: EncodedCorpus, corpus: str, sha256: str, remedy: str) -> None:
    """Raises ContractError with both digests if a corpus is not what was encoded: its ids may be those of other
    passages. (What was appended to or deleted from is of no one file.)"""
    found = encoded.corpus["sha256"]
    if len(encoded.parts) == 1 and found != sha256:
        told = f"its texts have SHA-256 {sha256}, those that were encoded {found}"
        raise ContractError(f"{corpus} is not what {encoded.folder} was encoded from: {told}; {remedy}")


def is_run(pool: str) -> bool:
    """Whether a pool is named by the folder of a run."""
    return Workdir(pool).contract.is_file()
