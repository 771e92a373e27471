"""Candidates by one vector a passage: their scores are exact, and what they miss is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.records import Query
from jaxret.retrieval import candidates as candidates_module
from jaxret.retrieval.backends import Backend, select_backend
from jaxret.retrieval.candidates import Proposer, Wanted, compared, read_wanted, told
from jaxret.retrieval.encode import encode_corpus
from jaxret.retrieval.fronts import FRONTS
from jaxret.retrieval.retrieve import Searcher, choose_corpus
from jaxret.retrieval.search import InMemory
from jaxret.runs.run import open_run
from jaxret.tools.search_files import search_files
from jaxret.types import Ragged
from tests.pipeline import untrained_run, write_data, write_encoder
from tests.retrieval.late_test import blocks, brute_force, counts, lists

K = 5


class Passages(InMemory):
    """Blocks with ids."""

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return [f"p{row}" for row in indices]


def faiss() -> Backend:
    return select_backend("faiss-cpu")


def proposed(name: str, queries: Ragged, documents: Ragged, count: int) -> np.ndarray:
    """The rows [Q,count] that a front ranks highest, by loops."""
    front = FRONTS[name].of(documents.flat.shape[1])
    made = np.stack([front.passage(vectors) for vectors in documents]).astype(np.float64)
    asked = np.stack([front.query(vectors) for vectors in queries]).astype(np.float64)
    return np.argsort(-(asked @ made.T), axis=1, kind="stable")[:, :count]


@pytest.mark.parametrize("many", [False, True], ids=["from shards", "kept"])
@pytest.mark.parametrize("name", list(FRONTS))
def test_the_best_of_what_a_front_proposes_by_exact_scores(name: str, many: bool) -> None:
    queries, documents = lists([3, 1, 6, 2], 1), lists(counts(90), 2)
    corpus = Passages(blocks(documents, 40))
    found = Proposer.open(corpus, Wanted(name, 20), faiss(), many)(queries, corpus, K)
    rows = proposed(name, queries, documents, 20)
    scores, ranking = brute_force(queries, documents, len(documents))
    for query, there in enumerate(rows):
        kept = np.isin(ranking[query], there)
        np.testing.assert_array_equal(found.rows[query], ranking[query][kept][:K])
        assert found.scores[query].tobytes() == scores[query][kept][:K].tobytes()
    assert (found.rows != ranking[:, :K]).any(), "control: something is missed"
    assert found.scored == 4 * 20


def test_all_passages_as_candidates_are_the_exact_result() -> None:
    queries, documents = lists([3, 1, 6], 1, integers=True), lists(counts(60), 2, integers=True)
    corpus = Passages(blocks(documents, 25))
    found = Proposer.open(corpus, Wanted("mean", 1000), faiss())(queries, corpus, K)
    scores, rows = brute_force(queries, documents, K)
    np.testing.assert_array_equal(found.rows, rows)
    assert found.scores.tobytes() == scores.tobytes()


def test_passages_of_as_many_vectors_each() -> None:
    """MLR, ME-BERT, MVR: [rows,V,D], a query of one vector."""
    vectors = np.random.default_rng(3).standard_normal((70, 3, 8), dtype=np.float32)
    queries = Ragged.from_stacked(np.random.default_rng(4).standard_normal((6, 1, 8), dtype=np.float32))
    corpus = Passages([vectors[:30], vectors[30:]])
    found = Proposer.open(corpus, Wanted("mean", 15), faiss())(queries, corpus, K)
    rows = proposed("mean", queries, Ragged.from_stacked(vectors), 15)
    exact = np.einsum("qd,nvd->qnv", queries.flat.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
    best = [there[np.argsort(-score[there])][:K] for there, score in zip(rows, exact, strict=True)]
    np.testing.assert_array_equal(found.rows, best)
    missed = compared(Wanted("mean", 15), found, queries, corpus, faiss())
    expected = np.mean([np.isin(np.argsort(-s)[:K], row).mean() for s, row in zip(exact, found.rows, strict=True)])
    assert missed["recall_of_exact"]["5"] == pytest.approx(expected)
    assert expected < 1, "control: something is missed"
    assert (missed["candidates"], missed["queries_compared"]) == ("mean:15", 6)
    assert "R@1 " in told(missed)


def test_queries_a_few_at_a_time_and_passages_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = lists([3, 1, 6, 2, 4], 1), lists(counts(50), 2)
    corpus = Passages(blocks(documents, 40))

    def search_now() -> list[np.ndarray]:
        found = Proposer.open(corpus, Wanted("mean", 10), faiss())(queries, corpus, K)
        return [found.rows, found.scores]

    whole = search_now()
    monkeypatch.setattr(candidates_module, "PASS_CANDIDATES", 20)
    monkeypatch.setattr(candidates_module, "FRONT_BYTES", 3 * 4 * 8)
    for expected, found in zip(whole, search_now(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_score_between_two_float32_numbers_is_summed_exactly() -> None:
    """1 + 2^-24 is halfway between two float32 numbers; twice 2^-53 decides, and a float64 sum loses both."""
    vectors = np.array([[[1, 2.0**-24, 2.0**-53, 2.0**-53], [0, 0, 0, 0]]] * 2, np.float32)
    corpus, queries = Passages([vectors]), Ragged.from_stacked(np.ones((1, 1, 4), np.float32))
    found = Proposer.open(corpus, Wanted("mean", 2), faiss())(queries, corpus, 1)
    assert found.scores.item() == 1 + 2.0**-23


@pytest.mark.parametrize("text", ["mean", "mean:", "mean:0", "mean:-3", "middle:10", "10", "mean:1e3"])
def test_a_front_that_there_is_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"--candidates is '.*'; it must be .*: mean:1000, muvera:1000"):
        read_wanted(text)


def test_what_cannot_be_proposed_is_an_error() -> None:
    assert str(read_wanted("muvera:30")) == "muvera:30"
    queries, documents = lists([3, 1], 1), lists(counts(20), 2)
    corpus = Passages([documents])
    with pytest.raises(ValueError, match=r"mean:4 proposes fewer passages than the 5 that are asked for"):
        Proposer.open(corpus, Wanted("mean", 4), faiss())(queries, corpus, K)
    single = Passages([np.ones((4, 1, 8), np.float32)])
    with pytest.raises(ValueError, match=r"for passages of several vectors; here each has one"):
        Proposer.open(single, Wanted("mean", 9), faiss())
    documents.flat[int(documents.offsets[7])] = np.nan
    for parts in (corpus, Passages(blocks(documents, 5))):
        with pytest.raises(ValueError, match=r"document row 7 has a NaN"):
            Proposer.open(parts, Wanted("mean", 9), faiss())(queries, parts, K)


@pytest.mark.exhaustive
def test_a_run_is_searched_and_what_was_missed_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data, head__name="layers", head__layers__chosen=(1, 2, 3))
    run = open_run(tmp_path / "run")
    encode_corpus(run, data, progress=False)
    files: dict[str, Any] = {
        "queries": str(data),
        "qrels": str(data),
        "split": "test",
        "measures": ["RR@5"],
        "progress": False,
    }
    exact = search_files(run, k=K, latency=0, **files)
    found = search_files(run, k=K, latency=2, candidates="mean:6", **files)
    assert exact
    assert found
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
    assert "'exact': True" in str(json.loads(before.read_text())), "the exact result stays"
    with pytest.raises(ValueError, match="--candidates=mean:4 proposes fewer passages than the 5"):
        search_files(run, k=K, candidates="mean:4", **files)
    searcher = Searcher(run, choose_corpus(run), candidates="mean:1000")
    assert searcher.search([Query("q", "silver river")], 1).approximate == {"candidates": "mean:1000"}, "never exact"
    assert searcher.description.endswith(" candidates a query by mean")
    assert searcher.proposer
