"""Read the texts of a data set with results: queries, judgements, passages, rankings, and the vectors that won."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxret.data.errors import Policy
from jaxret.data.formats import RankingSource
from jaxret.data.records import Passage, Query, Rankings
from jaxret.experiments.report.run_files import ComparedSet, RunFiles
from jaxret.experiments.searches.evaluation_queries import EvaluationQueries, EvaluationSource
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.passages import Passages
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run
from jaxret.search.bm25_index import BM25_MANIFEST
from jaxret.storage.atomic import read_json

Winners = dict[tuple[str, str], str]  # (query id, passage id) -> name of the passage's vector with the best score


@dataclass(frozen=True)
class SetTexts:
    """Texts of the queries and passages of a data set."""

    set_results: ComparedSet  # the data set and its results

    @cached_property
    def evaluation_queries(self) -> EvaluationQueries:
        """Queries and judgements. Raises ContractError if the files have changed since the results were measured."""
        run = self.set_results.runs[0]
        origin = run.results[self.set_results.name].get("provenance", {}).get("dataset", {})
        if "queries" not in origin or "sha256" not in origin:
            raise ContractError(f"{run.workdir.evaluation(self.set_results.name)} does not say where its queries are")
        source = EvaluationSource.open(origin["queries"], origin.get("qrels", ""), origin.get("split", ""))
        evaluation_queries = source.read(Policy("skip"))
        if evaluation_queries.digests() != origin["sha256"]:
            raise ContractError(f"the queries or judgements of {origin['queries']} have changed since the evaluation")
        return evaluation_queries

    @cached_property
    def queries(self) -> dict[str, Query]:
        return {query.id: query for query in self.evaluation_queries.queries}

    @cached_property
    def relevant(self) -> set[tuple[str, str]]:
        """(query id, passage id) of the relevant passages."""
        return {
            (judgement.query_id, judgement.passage_id)
            for judgement in self.evaluation_queries.judgements
            if judgement.relevance > 0
        }

    def passages(self, ids: Collection[str]) -> dict[str, Passage]:
        """Return passages by id. Raises FileNotFoundError if no run still has the encoded corpus."""
        by_id: dict[str, Passage] = {}
        for texts in self._readers:
            by_id |= texts.read([key for key in ids if key not in by_id])
        return {key: by_id.get(key) or Passage(key, "") for key in ids}

    @cached_property
    def _readers(self) -> list[Passages]:
        """Readers of the parts of the corpus that the results were measured on, last part first."""
        for run in self.set_results.runs:
            if folders := _corpus_folders(run, self.set_results.name):
                return [Passages(folder) for folder in reversed(folders)]
        raise FileNotFoundError("no run still has the encoded corpus of these results, so the texts cannot be found")


def _corpus_folders(run: RunFiles, result: str) -> list[Path]:
    """Return the folders with the parts of the corpus that a result was measured on; [] if the run no longer has
    them."""
    corpus = run.results[result]["provenance"]["corpus"]
    for name in run.workdir.corpora:
        encoded_corpus = open_encoded(run.workdir.embeddings(name), verify=False)
        if encoded_corpus.corpus_identity == corpus:
            return [shards.folder for shards in encoded_corpus.shards]
    manifests = sorted(run.workdir.path.glob(f"bm25/*/{BM25_MANIFEST}"))
    return [path.parent for path in manifests if read_json(path).get("corpus") == corpus][:1]


def read_rankings(run: RunFiles, result: str) -> Rankings:
    """Return the rankings of a data set. Raises FileNotFoundError if the run has no file of them."""
    return RankingSource.open(run.workdir.rankings(result)).read()


def winning_vectors(
    run: RunFiles, result: str, queries: Sequence[Query], hits: Mapping[str, Sequence[Passage]]
) -> Winners:
    """Return the name of each passage's vector, before pooling, that has the best score with its query. The model of
    the run encodes the texts again, with the lengths and the vector size of the search.

    Args:
        run: the run that has the result.
        result: name of the data set.
        queries: queries with their texts.
        hits: query id -> passages.

    Raises:
        CheckpointError, ContractError, FileNotFoundError: the checkpoint of the result cannot be opened.
    """
    checkpoint = run.results[result]["provenance"]["checkpoint"]
    search = run.results[result]["provenance"]["search"]
    lengths = {key: search.get(key) for key in ("query_length", "passage_length")}
    full_run = open_run(run.workdir, str(checkpoint["step"]), **lengths).with_dimension(search.get("dimension", 0))
    if full_run.checkpoint["digest"] != checkpoint["digest"]:
        raise ContractError(f"checkpoint {checkpoint['step']} of {run.workdir} has changed since the evaluation")
    passages = {passage.id: passage for query_hits in hits.values() for passage in query_hits}
    tokens = full_run.tokenizer.queries(queries)
    query_vectors = full_run.embedder()(tokens, "query").stacked()[:, 0]
    tokens = full_run.tokenizer.passages(list(passages.values()))
    vectors = full_run.embedder(unpooled=True)(tokens, "passage").stacked()
    row = {key: place for place, key in enumerate(passages)}
    winners: Winners = {}
    for query, vector in zip(queries, query_vectors.astype(np.float64), strict=True):
        for passage in hits[query.id]:
            winners[query.id, passage.id] = run.vector_names[int((vectors[row[passage.id]] @ vector).argmax())]
    return winners
