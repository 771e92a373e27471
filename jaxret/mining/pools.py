"""Pools of hard negatives: BM25, a run that encoded the corpus, or a file of rankings.

If it can, a pool also scores positives that it did not retrieve. A margin compares the scores of a negative and a
positive, and both must come from the same scorer.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.formats.trec import rank_lines
from jaxret.data.records import Passage, Query, Ranking
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.ray_cluster import RayWorkers
from jaxret.runs.run import config_of_task, find_best_checkpoint, open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.bm25 import BM25
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.ray_search import open_searcher
from jaxret.search.search_options import SearchOptions
from jaxret.storage.atomic import sha256_file
from jaxret.types import TextVectors

BM25_NAME = "bm25"


class PoolResult(NamedTuple):
    """The ranking of a query by a pool, and its positives' scores."""

    ranking: Ranking  # best first
    positives: dict[str, float]  # id -> score; positives that the pool cannot score are missing


@runtime_checkable
class NegativePool(Protocol):
    """A source of hard negatives."""

    name: str
    # Whether scores are at most 1 (cosines), so that a share of a score is meaningful; None: unknown.
    has_bound: bool | None

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[PoolResult]:
        """Rank `depth` passages for each query, and score its positives (ids)."""
        ...

    def parent(self) -> dict[str, Any]:
        """Return the record of `pool_parent`."""
        ...


class BM25Pool:
    """A pool of BM25 over a corpus, with the default settings."""

    has_bound: bool | None = False

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.name = BM25_NAME
        self._index = BM25.of(passages, BM25Settings(), progress=True)

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[PoolResult]:
        rankings = self._index.search(queries, depth, progress=True)
        results = []
        for query, ids in zip(queries, positives, strict=True):
            scores = dict(rankings[query.id])
            missing_ids = [key for key in ids if key not in scores]
            scores = {key: scores[key] for key in ids if key in scores} | self._index.scores(query, missing_ids)
            results.append(PoolResult(rankings[query.id], scores))
        return results

    def parent(self) -> dict[str, Any]:
        return pool_parent(BM25_NAME)


class RunPool:
    """A pool of a run's exact search of a corpus that it encoded.

    Memory holds the ids of the corpus, its vectors if they are few, and all vectors of a block of queries (under late
    interaction, one for each token).
    """

    def __init__(self, workdir: str, encoded_name: str, positives: set[str], workers: RayWorkers | None = None) -> None:
        """Open a run and its encoded corpus.

        Args:
            encoded_name: name of the encoded corpus; "": the only one.
            positives: ids of the passages that `scores` and `missing` may be called with.
            workers: workers of a cluster that search in place of this process.
        """
        run = open_run(workdir, attention="plain" if workers else None)
        self.name = run.workdir.name
        self.has_bound: bool | None = bool(run.config.normalize)
        folder, options = corpus_folder(run.workdir, encoded_name, "--encoded"), SearchOptions(workers=workers)
        self.searcher = open_searcher(run, folder, options, many=True)
        self._rows: dict[str, int] = {}
        for first, ids in self.searcher.encoded_corpus.id_blocks():
            self._rows |= {key: row for row, key in enumerate(ids, first) if key in positives}

    def require_corpus(self, corpus: Corpus, sha256: str) -> None:
        """Raise ContractError if texts are read from another file than the one that was encoded."""
        require_encoded(self.searcher.encoded_corpus, corpus, sha256, "give that, or remove --corpus")

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[PoolResult]:
        outcome = self.searcher.search(queries, depth, progress=True)
        scores = self._scores(outcome.vectors, positives)
        return [PoolResult(outcome.rankings[query.id], row) for query, row in zip(queries, scores, strict=True)]

    def scores(self, queries: Sequence[Query], passages: Sequence[Sequence[str]]) -> list[dict[str, float]]:
        """Return id -> score of each query's passages, equal to a search; ids that the corpus lacks are left out."""
        return self._scores(self.searcher.encode(queries)[1], passages)

    def missing(self, passages: Iterable[str]) -> list[str]:
        """Return those of the ids that the pool was opened for that are not in the corpus."""
        return [key for key in passages if key not in self._rows]

    def _scores(self, vectors: TextVectors, passages: Sequence[Sequence[str]]) -> list[dict[str, float]]:
        encoded_ids = [[key for key in ids if key in self._rows] for ids in passages]
        scores = self.searcher.scores(vectors, [[self._rows[key] for key in ids] for ids in encoded_ids])
        return [dict(zip(ids, row, strict=True)) for ids, row in zip(encoded_ids, scores, strict=True)]

    def parent(self) -> dict[str, Any]:
        run, identity = self.searcher.run, self.searcher.encoded_corpus.corpus_identity
        return {"pool": str(run.workdir), "checkpoint": run.checkpoint, "corpus": identity}


class RankingFilePool:
    """A pool of a file of rankings, in any format.

    The file is copied once into a temporary file with one ranking a line, so that one ranking is in memory at a time,
    in any order of queries. A positive outside its query's ranking scores -inf. Scores of a file of ranks are NaN.
    """

    has_bound: bool | None = None

    def __init__(self, source: RankingSource, policy: Policy) -> None:
        """Raise DataError for bad records, and for a query whose lines are not consecutive."""
        self.name, self._source = source.source, source
        self.ranks_alone = source.without_scores
        self._offsets: dict[str, int] = {}
        self._texts: dict[str, str] = {}  # texts of queries, if the format has them; ids may then be row numbers
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the pool)
        for query, lines in groupby(source.read_lines(policy), key=lambda line: line.query_id):
            ranking = rank_lines(lines, policy)[query]
            if query in self._offsets:
                description = f"the lines of query {query!r} are not together"
                location = Location(source.file.path, ranking[0].location.line)
                raise location.error("scattered query", description, "sort them by query")
            self._offsets[query] = self._file.tell()
            if ranking[0].query_text:
                self._texts[query] = ranking[0].query_text
            pairs = [[line.passage_id, math.nan if self.ranks_alone else line.score] for line in ranking]
            self._file.write(json.dumps(pairs).encode() + b"\n")

    def require_queries(self, queries: Sequence[Query], data: str) -> None:
        """Raise ValueError if the file ranks none of the training queries, or has other texts for their ids."""
        ranked_queries = [query for query in queries if query.id in self._offsets]
        if not ranked_queries:
            raise ValueError(
                f"{self._source} ranks none of the {len(queries):,} queries of {data} ({queries[0].id!r}, ...); give "
                "the results of a search for these"
            )
        for query in ranked_queries:
            if query.id in self._texts and self._texts[query.id] != query.text:
                raise ValueError(
                    f"{self._source}: its query {query.id} is {self._texts[query.id][:60]!r}, but that of {data} is "
                    f"{query.text[:60]!r}. Both number their rows; give the results of a search for these queries"
                )

    def ranking(self, query: str) -> list[tuple[str, float]]:
        """Return the ranking of a query, best first; empty if the file has none."""
        if query not in self._offsets:
            return []
        self._file.seek(self._offsets[query])
        return [(key, score) for key, score in json.loads(self._file.readline())]

    def rank(self, queries: Sequence[Query], positives: Sequence[Sequence[str]], depth: int) -> list[PoolResult]:
        """Return the first `depth` passages that the file ranks for each query. The score of a positive that the file
        does not rank is minus infinity."""
        results = []
        for query, ids in zip(queries, positives, strict=True):
            ranking = self.ranking(query.id)
            scores = dict(ranking)
            results.append(PoolResult(ranking[:depth], {key: scores.get(key, -math.inf) for key in ids}))
        return results

    def parent(self) -> dict[str, Any]:
        return rankings_parent(self._source)


def rankings_parent(source: RankingSource) -> dict[str, Any]:
    """Return the record of a pool of rankings, with digests, for JSON."""
    return {"pool": source.source, "files": {str(path): sha256_file(path) for path in source.files}}


def pool_parent(name: str, encoded_name: str = "") -> dict[str, Any]:
    """Return the record of BM25 or of a run, with digests, for JSON, without opening the pool.

    Raises CheckpointError for a run without a checkpoint, and the errors of `corpus_folder`. encoded_name: name of the
    encoded corpus of a run.
    """
    if name == BM25_NAME:
        return {"pool": name, **asdict(BM25Settings())}
    workdir = Workdir(name)
    checkpoint = find_best_checkpoint(workdir, config_of_task(workdir, "retrieval"))
    encoded_corpus = open_encoded(corpus_folder(workdir, encoded_name, "--encoded"), verify=False)
    return {"pool": str(workdir), "checkpoint": checkpoint, "corpus": encoded_corpus.corpus_identity}


def require_encoded(encoded_corpus: EncodedCorpus, corpus: Corpus, sha256: str, remedy: str) -> None:
    """Raise ContractError with both digests if a corpus is not the one that was encoded: ids may name other passages.

    A corpus that was changed after its encoding (--append, --delete) has no file to compare with.

    Args:
        encoded_corpus: vectors of the corpus.
        corpus: the corpus that is open.
        sha256: digest of the open corpus.
        remedy: end of the message.
    """
    encoded_sha256 = encoded_corpus.corpus_identity["sha256"]
    if len(encoded_corpus.parts) == 1 and encoded_sha256 != sha256:
        digests = f"its texts have SHA-256 {sha256}, those that were encoded {encoded_sha256}"
        raise ContractError(f"{corpus} is not what {encoded_corpus.folder} was encoded from: {digests}; {remedy}")


def is_run_folder(pool: str) -> bool:
    """Return whether a pool's name is the folder of a run."""
    return Workdir(pool).contract.is_file()
