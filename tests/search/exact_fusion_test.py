"""Exact fusion against a brute force over all passages: BM25 fused with random scores of every passage."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxret.data.records import Judgement, Passage, Query
from jaxret.evaluation.fusion import best_weights, weights_to_try
from jaxret.evaluation.metrics import evaluate
from jaxret.experiments.fuse_runs import tune_systems
from jaxret.search.bm25 import BM25
from jaxret.search.exact_fusion import SCALES, BM25System, ExactFusion, ScoringSystem, SystemWithoutSelfMatches, TopRows

WORDS = ["river", "stone", "music", "light", "forest", "market", "winter", "garden"]
QUERIES = [Query("one", "river"), Query("two", "garden stone music"), Query("none", "submarine")]


@dataclass
class Vectors:
    """A system whose scores are products of vectors; many scores are equal."""

    vectors: np.ndarray
    depths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.vectors)

    def ids(self, rows: np.ndarray) -> list[str]:
        return [f"p{row}" for row in rows]

    def products(self, query: Query) -> np.ndarray:
        return self.vectors @ np.random.default_rng(len(query.text)).integers(-2, 3, self.vectors.shape[1]).astype(
            float
        )

    def top(self, query: Query, k: int) -> TopRows:
        self.depths.append(k)
        scores = self.products(query)
        rows = np.argsort(-scores, kind="stable")[:k]
        return TopRows(rows, scores[rows])

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        return self.products(query)[rows]


@pytest.fixture
def systems() -> tuple[BM25System, Vectors]:
    random = np.random.default_rng(3)
    texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(200)]
    index = BM25.of(Passage(f"p{row}", text) for row, text in enumerate(texts))
    return BM25System(index), Vectors(random.integers(-2, 3, (200, 4)).astype(float))


@pytest.mark.parametrize("method", SCALES)
@pytest.mark.parametrize("weights", [(0.5, 0.5), (1.0, 0.0), (0.1, 2.0)])
def test_the_best_sums_are_those_over_all_passages(
    method: str, weights: tuple[float, float], systems: tuple[BM25System, Vectors]
) -> None:
    """The first candidates are too few for some queries; ties are in the order of the corpus."""
    fusion, every = ExactFusion(method, weights, depth=7), np.arange(200)
    fused = fusion(systems, QUERIES, 5)
    for query in QUERIES:
        sums, pair = np.zeros(200), list[ScoringSystem](systems)
        for system, weight in zip(pair, weights, strict=True):
            scores = system.scores_of(query, every)
            first = system.top(query, 7).scores
            scale = SCALES[method](first) if len(first) else SCALES["sum"](first)
            sums += weight * scale(scores)
        best = np.argsort(-sums, kind="stable")[:5]
        if query.id == "none" and weights[1] == 0:
            continue  # no passage has a word of the query, so BM25 alone ranks nothing
        assert fused[query.id] == [(f"p{row}", sums[row]) for row in best], query
    assert max(systems[1].depths) > 7, "some queries need more than the first candidates"


def test_control_fusing_only_first_candidates_differs(systems: tuple[BM25System, Vectors]) -> None:
    """The control of the test above: a sum over the union of the first candidates misses some of the best passages."""
    query, sums = QUERIES[1], np.zeros(200)
    for system in systems:
        sums += system.scores_of(query, np.arange(200))
    union = np.unique(np.concatenate([system.top(query, 7).rows for system in systems]))
    best = {f"p{row}" for row in np.argsort(-sums, kind="stable")[:20]}
    assert best - {f"p{row}" for row in union}
    fused = ExactFusion("sum", (1.0, 1.0), depth=7)(systems, [query], 20)
    assert {key for key, _ in fused[query.id]} == best


def test_own_passages_of_queries_are_not_ranked(systems: tuple[BM25System, Vectors]) -> None:
    """The passage does not count in the scale either: the result is that of a corpus without it."""
    (query, *_) = QUERIES
    own = int(systems[1].top(query, 1).rows[0])
    queries = [Query(f"p{own}", query.text)]
    kept = ExactFusion("min_max", (0.2, 0.8), depth=7)(systems, queries, 5)[f"p{own}"]
    assert own in [int(key[1:]) for key, _ in kept], "control: the passage is ranked if it is not left out"
    pair: list[ScoringSystem] = [*systems]
    without = [SystemWithoutSelfMatches(system) for system in pair]
    fused = ExactFusion("min_max", (0.2, 0.8), depth=7)(without, queries, 5)
    others = np.delete(np.arange(200), own)
    sums = np.zeros(199)
    for system, weight in zip(pair, (0.2, 0.8), strict=True):
        scores = system.scores_of(queries[0], others)
        sums += weight * SCALES["min_max"](np.sort(scores)[::-1][:7])(scores)
    best = np.argsort(-sums, kind="stable")[:5]
    assert fused[f"p{own}"] == [(f"p{others[row]}", sums[row]) for row in best]


def test_bad_settings(systems: tuple[BM25System, Vectors]) -> None:
    with pytest.raises(ValueError, match=r"'rrf'; .*folders .*min_max, z_score"):
        ExactFusion("rrf", (1.0, 1.0))
    with pytest.raises(ValueError, match="no weight may be below 0"):
        ExactFusion("sum", (1.0, -1.0))
    with pytest.raises(ValueError, match=r"systems of \[3, 200\] passages"):
        ExactFusion("sum", (1.0, 1.0))([systems[0], Vectors(np.ones((3, 2)))], QUERIES, 1)


@dataclass
class Counted(Vectors):
    """A system that counts how often it scores passages."""

    calls: int = 0

    def scores_of(self, query: Query, rows: np.ndarray) -> np.ndarray:
        self.calls += 1
        return super().scores_of(query, rows)


@pytest.mark.parametrize("method", SCALES)
def test_tuned_weights_equal_a_brute_force(method: str, systems: tuple[BM25System, Vectors]) -> None:
    """The oracle tries all weights over all passages. A system computes its scores once, not once for each of the 21
    weights."""
    words, vectors = systems[0], Counted(systems[1].vectors)
    pair: list[ScoringSystem] = [words, vectors]
    every, queries = np.arange(200), QUERIES[:2]
    relevant = {
        query.id: np.argsort(-words.scores_of(query, every) - vectors.scores_of(query, every) / 4)[:9:2]
        for query in queries
    }
    judgements = [Judgement(key, f"p{row}", 1) for key, rows in relevant.items() for row in rows]
    values = {}
    for weights in weights_to_try(2):
        rankings = {}
        for query in queries:
            sums = np.zeros(200)
            for system, weight in zip(pair, weights, strict=True):
                scores = system.scores_of(query, every)
                sums += weight * SCALES[method](np.sort(scores[scores != 0] if system is words else scores))(scores)
            best = np.argsort(-sums, kind="stable")[:10]
            rankings[query.id] = [(f"p{row}", float(sums[row])) for row in best]
        values[weights] = evaluate(rankings, judgements, ["nDCG@10"]).mean["nDCG@10"]
    vectors.calls = 0
    assert tune_systems(pair, queries, judgements, "nDCG@10", method) == best_weights(values)
    assert vectors.calls == len(queries)
    assert len(set(values.values())) > 2, "control: weights matter"
