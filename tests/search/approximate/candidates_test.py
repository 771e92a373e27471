"""Candidates by one vector per passage: their scores are exact, and the recall of the candidates is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Query
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.search.approximate import candidates as candidates_module
from jaxret.search.approximate.candidates import (
    CandidateGenerator,
    compare_with_exact,
    describe_recall,
)
from jaxret.search.approximate.proxies import PROXIES
from jaxret.search.backends.select import Backend, select_backend
from jaxret.search.search_options import CandidateSpec, SearchOptions, parse_candidates
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.vector_corpus import BlockCorpus
from jaxret.types import Ragged
from tests.pipeline import untrained_run, write_data, write_encoder
from tests.search.vectors.multi_vector_test import blocks, brute_force, counts, lists

K = 5


class Passages(BlockCorpus):
    """A corpus of blocks, with ids."""

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return [f"p{row}" for row in indices]


def faiss() -> Backend:
    return select_backend("faiss-cpu")


def proposed(name: str, queries: Ragged, passages: Ragged, count: int) -> np.ndarray:
    """Return the rows [Q,count] that a proxy ranks highest, by loops."""
    proxy = PROXIES[name].of(passages.flat.shape[1])
    made = np.stack([proxy.passage(vectors) for vectors in passages]).astype(np.float64)
    query_vectors = np.stack([proxy.query(vectors) for vectors in queries]).astype(np.float64)
    return np.argsort(-(query_vectors @ made.T), axis=1, kind="stable")[:, :count]


@pytest.mark.parametrize("many", [False, True], ids=["from shards", "kept"])
@pytest.mark.parametrize("name", list(PROXIES))
def test_candidates_of_proxies_are_ranked_by_exact_scores(name: str, many: bool) -> None:
    queries, passages = lists([3, 1, 6, 2], 1), lists(counts(90), 2)
    corpus = Passages(blocks(passages, 40))
    result = CandidateGenerator.open(corpus, CandidateSpec(name, 20), faiss(), many)(queries, corpus, K)
    rows = proposed(name, queries, passages, 20)
    scores, ranking = brute_force(queries, passages, len(passages))
    for query, candidate_rows in enumerate(rows):
        kept = np.isin(ranking[query], candidate_rows)
        np.testing.assert_array_equal(result.rows[query], ranking[query][kept][:K])
        assert result.scores[query].tobytes() == scores[query][kept][:K].tobytes()
    assert (result.rows != ranking[:, :K]).any(), "control: some results are missed"
    assert result.scored_pairs == 4 * 20


def test_all_passages_as_candidates_are_the_exact_result() -> None:
    queries, passages = lists([3, 1, 6], 1, integers=True), lists(counts(60), 2, integers=True)
    corpus = Passages(blocks(passages, 25))
    result = CandidateGenerator.open(corpus, CandidateSpec("mean", 1000), faiss())(queries, corpus, K)
    scores, rows = brute_force(queries, passages, K)
    np.testing.assert_array_equal(result.rows, rows)
    assert result.scores.tobytes() == scores.tobytes()


def test_passages_with_equal_numbers_of_vectors() -> None:
    """MLR, ME-BERT, MVR: [rows,V,D], with queries of one vector."""
    vectors = np.random.default_rng(3).standard_normal((70, 3, 8), dtype=np.float32)
    queries = Ragged.from_stacked(np.random.default_rng(4).standard_normal((6, 1, 8), dtype=np.float32))
    corpus = Passages([vectors[:30], vectors[30:]])
    result = CandidateGenerator.open(corpus, CandidateSpec("mean", 15), faiss())(queries, corpus, K)
    rows = proposed("mean", queries, Ragged.from_stacked(vectors), 15)
    exact = np.einsum("qd,nvd->qnv", queries.flat.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
    best = [
        candidate_rows[np.argsort(-score[candidate_rows])][:K]
        for candidate_rows, score in zip(rows, exact, strict=True)
    ]
    np.testing.assert_array_equal(result.rows, best)
    missed = compare_with_exact(CandidateSpec("mean", 15), result, queries, corpus, faiss())
    expected = np.mean([np.isin(np.argsort(-s)[:K], row).mean() for s, row in zip(exact, result.rows, strict=True)])
    assert missed["recall_of_exact"]["5"] == pytest.approx(expected)
    assert expected < 1, "control: some results are missed"
    assert (missed["candidates"], missed["queries_compared"]) == ("mean:15", 6)
    assert "R@1 " in describe_recall(missed)


def test_batches_of_queries_and_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, passages = lists([3, 1, 6, 2, 4], 1), lists(counts(50), 2)
    corpus = Passages(blocks(passages, 40))

    def search_now() -> list[np.ndarray]:
        result = CandidateGenerator.open(corpus, CandidateSpec("mean", 10), faiss())(queries, corpus, K)
        return [result.rows, result.scores]

    whole = search_now()
    monkeypatch.setattr(candidates_module, "PASS_CANDIDATES", 20)
    monkeypatch.setattr(candidates_module, "PROXY_BYTES", 3 * 4 * 8)
    for expected, actual in zip(whole, search_now(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_score_between_two_float32_numbers_is_summed_exactly() -> None:
    """1 + 2^-24 is halfway between two float32 numbers; twice 2^-53 decides, which a float64 sum loses."""
    vectors = np.array([[[1, 2.0**-24, 2.0**-53, 2.0**-53], [0, 0, 0, 0]]] * 2, np.float32)
    corpus, queries = Passages([vectors]), Ragged.from_stacked(np.ones((1, 1, 4), np.float32))
    result = CandidateGenerator.open(corpus, CandidateSpec("mean", 2), faiss())(queries, corpus, 1)
    assert result.scores.item() == 1 + 2.0**-23


@pytest.mark.parametrize("text", ["mean", "mean:", "mean:0", "mean:-3", "middle:10", "10", "mean:1e3"])
def test_an_unknown_proxy(text: str) -> None:
    with pytest.raises(ValueError, match=r"candidates is '.*'; it must be .*: mean:1000, muvera:1000"):
        parse_candidates(text)


def test_unsupported_candidates_are_errors() -> None:
    assert str(parse_candidates("muvera:30")) == "muvera:30"
    queries, passages = lists([3, 1], 1), lists(counts(20), 2)
    corpus = Passages([passages])
    with pytest.raises(ValueError, match=r"mean:4 .*5 .*requested"):
        CandidateGenerator.open(corpus, CandidateSpec("mean", 4), faiss())(queries, corpus, K)
    single = Passages([np.ones((4, 1, 8), np.float32)])
    with pytest.raises(ValueError, match=r"passages .*several vectors"):
        CandidateGenerator.open(single, CandidateSpec("mean", 9), faiss())
    passages.flat[int(passages.offsets[7])] = np.nan
    for parts in (corpus, Passages(blocks(passages, 5))):
        with pytest.raises(ValueError, match=r"passage row 7 has a NaN"):
            CandidateGenerator.open(parts, CandidateSpec("mean", 9), faiss())(queries, parts, K)


@pytest.mark.exhaustive
def test_a_run_is_searched_and_recall_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data, head__name="mlr", head__mlr__chosen=(1, 2, 3))
    run = open_run(tmp_path / "run")
    encode_corpus(run, Corpus.open(data), progress=False)

    def searched(k: int = K, latency: int = 0, candidates: str = "") -> Evaluation | None:
        evaluation = EvaluationOptions(k=k, measures=("RR@5",), latency=latency)
        return search_files(
            run, EvaluationSource.open(data, data), evaluation, SearchOptions(candidates=candidates), progress=False
        )

    exact = searched()
    result = searched(latency=2, candidates="mean:6")
    assert exact
    assert result
    printed = capsys.readouterr().out
    assert "approximate search of" in printed
    assert "approximate (mean:6): of what exact search finds, R@1 " in printed
    (saved,) = run.workdir.rankings("x").parent.glob("*.mean-6.candidates.json")
    missed = json.loads(saved.read_text())
    assert 0 < missed["recall_of_exact"]["5"] <= 1
    (results,) = run.workdir.evaluation("x").parent.glob("*.mean-6.json")
    told_of = json.loads(results.read_text())
    assert str(told_of).count("'exact': False") == 1
    assert str(told_of).count("'candidates': 'mean:6'") == 1
    (before,) = (path for path in results.parent.glob("*.json") if "mean" not in path.name)
    assert "'exact': True" in str(json.loads(before.read_text())), "the exact result is still there"
    with pytest.raises(ValueError, match="candidates=mean:4 proposes fewer passages than the 5"):
        searched(candidates="mean:4")
    searcher = Searcher(run, corpus_folder(run.workdir), SearchOptions(candidates="mean:1000"))
    assert searcher.search([Query("q", "silver river")], 1).approximate == {"candidates": "mean:1000"}, (
        "the result is not marked as exact"
    )
    assert searcher.vectors.description.endswith(" candidates a query by mean")
    assert searcher.vectors.generator
