"""Queries that are passages: they are removed from their own results, with the numbers of BEIR and trec_eval."""

from __future__ import annotations

import numpy as np
import pytest
import pytrec_eval

from jaxret.data.records import Judgement, Rankings
from jaxret.evaluation.metrics import evaluate
from jaxret.evaluation.self_matches import has_passages_as_queries, self_matching_queries, without_self_matches

K = 5


def rankings() -> Rankings:
    """Rankings of ten queries that are among twenty passages; most rank themselves first, but not all."""
    random = np.random.default_rng(0)
    scores = random.random((10, 20))
    scores[:7, :7] += np.eye(7)
    result = {}
    for query, row in enumerate(scores):
        order = np.argsort(-row)[: K + 1].tolist()
        result[f"d{query}"] = [(f"d{place}", float(row[place])) for place in order]
    return result


def test_measures_equal_beirs() -> None:
    """BEIR's evaluation.py removes the query's id from its results, and gives the rest to pytrec_eval."""
    result = rankings()
    random = np.random.default_rng(1)
    pairs = {(f"d{q}", f"d{p}") for q in range(10) for p in random.choice(20, 4, replace=False).tolist() if p != q}
    judgements = [Judgement(query, passage, 1) for query, passage in sorted(pairs)]
    qrels: dict[str, dict[str, int]] = {}
    for judgement in judgements:
        qrels.setdefault(judgement.query_id, {})[judgement.passage_id] = 1
    theirs = {query: {p: score for p, score in ranking if p != query} for query, ranking in result.items()}
    expected = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut_5"}).evaluate(theirs)
    kept = without_self_matches(result, K)
    ours = evaluate(kept, judgements, ["nDCG@5"]).per_query["nDCG@5"]
    assert ours == pytest.approx({query: values["ndcg_cut_5"] for query, values in expected.items()}, abs=1e-9)
    untouched = evaluate({q: r[:K] for q, r in result.items()}, judgements, ["nDCG@5"]).per_query["nDCG@5"]
    assert untouched != pytest.approx(ours, abs=1e-3)
    assert all(len(ranking) == K for ranking in kept.values()), "the search is one deeper than K"


def test_queries_that_retrieve_themselves_are_counted() -> None:
    result = rankings()
    assert (
        set(self_matching_queries(result)) == {query for query in result if query in dict(result[query])} != set(result)
    )
    assert not self_matching_queries(without_self_matches(result, K))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("arguana", True),
        ("beir-ArguAna-test", True),
        ("irds:beir/arguana", True),
        ("cranfield", False),
        ("arguanas", False),
    ],
)
def test_data_sets_with_self_matches(name: str, expected: bool) -> None:
    assert has_passages_as_queries(name) == expected
