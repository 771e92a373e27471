"""Which passages may become negatives: each filter by hand, and the choice from several pools."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxret.data.records import Example, Passage, Query
from jaxret.evaluation.answer_matching import AnswerMatcher
from jaxret.mining.filters import FILTERS, RetrievedPassages, filter_passages
from jaxret.mining.mining_settings import MiningSettings
from jaxret.mining.negative_selection import NegativeSelector
from jaxret.mining.pools import PoolResult
from jaxret.mining.training_queries import TrainingQuery

GOLD = Passage("gold", "The Seine runs through Paris.")
PASSAGES = (
    GOLD,
    Passage("copy", "the  SEINE runs\nthrough paris."),
    Passage("echo", "Which river runs through the capital of France?"),
    Passage("right", "Paris lies on the Seine, of course."),
    Passage("near", "The Rhine runs through Basel."),
    Passage("far", "Cats chase mice."),
)
SCORES = np.array([0.9, 0.9, 0.88, 0.87, 0.84, 0.2])
QUERY = Query("q", "which river runs through the capital of France?", ("the Seine", "La Seine"))
CASE = RetrievedPassages(QUERY, (GOLD,), frozenset(["gold"]), PASSAGES, SCORES, 0.9)


def names(case: RetrievedPassages = CASE, **settings: Any) -> list[str]:
    kept, _ = filter_passages(case, MiningSettings(**settings), AnswerMatcher())
    return [passage.id for passage, one in zip(case.passages, kept, strict=True) if one]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"answers": False}, ["right", "near", "far"]),
        ({}, ["near", "far"]),
        ({"margin": 0.0}, ["near", "far"]),
        ({"margin": 0.05, "answers": False}, ["near", "far"]),  # the limit is 0.85
        ({"margin": 0.07, "answers": False}, ["far"]),  # the limit is 0.83
        ({"share": 0.95, "answers": False}, ["near", "far"]),  # the limit is 0.855
        ({"share": 0.93, "answers": False}, ["far"]),  # the limit is 0.837
        ({"max_score": 0.7}, ["far"]),
        ({"max_score": 0.2}, []),  # a score at the limit is left out
        ({"min_score": 0.5}, ["near"]),
        ({"min_score": 0.84}, ["near"]),  # a score at the limit is kept
    ],
)
def test_candidates_remaining_after_each_filter(settings: dict[str, Any], left: list[str]) -> None:
    assert names(**settings) == left


def test_passages_without_text_are_compared_by_title() -> None:
    gold, passages = Passage("gold", "", "River Seine"), [Passage("copy", "", "river seine"), Passage("far", "", "Cat")]
    assert names(replace(CASE, positives=(gold,), passages=tuple(passages), scores=SCORES[:2])) == ["far"]
    selector, results = NegativeSelector(MiningSettings()), [PoolResult([("far", 2.0), ("copy", 1.0)], {})]
    example = selector.make_example(TrainingQuery(QUERY, (gold,)), results, {p.id: p for p in passages})
    assert example is not None
    assert (example.positive_scores, example.negative_scores) == ((1.0,), (2.0,))


def test_answers_may_be_regular_expressions() -> None:
    query = replace(QUERY, answers=(r"\bl\w+s on the seine",))
    case = replace(CASE, query=query)
    assert "right" in names(case), "the pattern does not occur as a string"
    kept, counts = filter_passages(
        case, MiningSettings(match="regex"), NegativeSelector(MiningSettings(match="regex"))._matcher
    )
    assert counts["an answer string in it"] == 1
    assert [p.id for p, one in zip(PASSAGES, kept, strict=True) if one] == ["near", "far"]
    with pytest.raises(ValueError, match=r"'q': .*'\(' .*expression"):
        AnswerMatcher("regex")(["text"], replace(QUERY, answers=("(",)))
    with pytest.raises(ValueError, match=r"match .*'glob'; .*'string', 'regex'"):
        MiningSettings(match="glob")


def test_a_share_of_a_negative_score_is_below_it() -> None:
    # The limit is -0.63; 0.95 x -0.6 = -0.57 would be above the positive.
    case = replace(CASE, scores=SCORES - 1.5, positive=-0.6)
    assert names(case, share=0.95, answers=False) == ["near", "far"]


@pytest.mark.parametrize("unknown", [math.nan, -math.inf])
def test_an_unscored_positive_leaves_no_candidate(unknown: float) -> None:
    case = replace(CASE, positive=unknown)
    assert names(case, margin=0.1) == names(case, share=0.5) == []
    assert names(case) == ["near", "far"], "a filter without a score needs none"
    scores = SCORES.copy()
    scores[5] = math.nan
    assert names(replace(CASE, scores=scores), margin=0.05) == ["near"]
    assert names(replace(CASE, scores=scores), min_score=0.1) == ["near"]
    assert names(replace(CASE, scores=scores), max_score=0.85) == ["near"]


def test_an_unscored_passage_is_not_counted_as_one_beyond_a_limit() -> None:
    """A teacher that scored the first 20 passages of a query has no score of the others."""
    case = replace(CASE, scores=np.array([*SCORES[:4], math.nan, 0.2]))
    limits: list[dict[str, Any]] = [{"max_score": 0.85}, {"min_score": 0.1}, {"margin": 0.05}, {"share": 0.9}]
    for limit in limits:
        _, counts = filter_passages(case, MiningSettings(**limit), AnswerMatcher())
        assert [kind for kind in list(counts)[3:] if counts[kind]] == ["without a score for the limits"], limit
    assert not filter_passages(case, MiningSettings(), AnswerMatcher())[1]["without a score for the limits"]  # control


def test_each_passage_is_counted_for_the_first_filter_that_leaves_it_out() -> None:
    _, counts = filter_passages(CASE, MiningSettings(margin=0.07), AnswerMatcher())
    assert list(counts) == list(FILTERS)
    assert [count for count in counts.values() if count] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 10, "skip": 10}, "there are no ranks from 11 to 10"),
        ({"keep": 0}, "keep is 0"),
        ({"draw": "best"}, r"draw .*'best'; .*'sample', 'top'"),
        ({"share": 1.5}, "share is 1.5"),
        ({"margin": -0.1}, "margin is -0.1"),
        ({"positives_from_retrieval": True, "answers": False}, "needs answer strings"),
    ],
)
def test_invalid_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MiningSettings(**settings)


# Choosing

TEXTS = {passage.id: passage for passage in PASSAGES}
RANKING = [(passage.id, score) for passage, score in zip(PASSAGES, SCORES.tolist())]
FOUND = PoolResult(RANKING, {"gold": 0.9})
ASKED = TrainingQuery(QUERY, (GOLD,))


def test_one_pool_keeps_its_scores() -> None:
    chooser = NegativeSelector(MiningSettings(keep=1, draw="top"))
    example = chooser.make_example(ASKED, [FOUND], TEXTS)
    assert example is not None
    assert ([p.id for p in example.negatives], example.negative_scores) == (["near"], (0.84,))
    assert (example.positives, example.positive_scores) == ((GOLD,), (0.9,))
    assert (chooser.tally.passages, chooser.tally.eligible, chooser.tally.negatives) == (6, 2, 1)


def test_two_pools_are_one_record_without_scores() -> None:
    other = PoolResult([("far", 12.0), ("near", 3.0)], {"gold": 14.0})
    example = NegativeSelector(MiningSettings(keep=1, draw="top")).make_example(ASKED, [FOUND, other], TEXTS)
    assert example is not None
    assert [p.id for p in example.negatives] == ["near", "far"]
    assert example.positive_scores == example.negative_scores == ()


def test_a_window_of_ranks() -> None:
    example = NegativeSelector(MiningSettings(depth=5, skip=4, answers=False)).make_example(ASKED, [FOUND], TEXTS)
    assert example is not None
    assert [p.id for p in example.negatives] == ["near"], "ranks are counted before any filter"


def test_a_sample_depends_on_seed_and_query_alone() -> None:
    many = {f"p{i}": Passage(f"p{i}", f"text {i}") for i in range(50)}
    result = PoolResult([(key, 1 - i / 100) for i, key in enumerate(many)], {})

    def drawn(seed: int, query: str = "q", pools: int = 1, draw: str = "sample") -> list[str]:
        chooser = NegativeSelector(MiningSettings(keep=5, seed=seed, draw=draw))
        chooser.make_example(ASKED, [FOUND], TEXTS)  # earlier calls have no effect
        example = chooser.make_example(TrainingQuery(Query(query, "a"), (GOLD,)), [result] * pools, many)
        assert example is not None
        return [p.id for p in example.negatives]

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1) != drawn(1, "another")
    assert drawn(1) == drawn(1, pools=2)[:5] != drawn(1, pools=2), "with two pools, other ranks are drawn"
    assert drawn(1, draw="top") == drawn(2, draw="top"), "the seed draws nothing"
    assert drawn(1) == sorted(drawn(1), key=lambda key: int(key[1:])), "negatives are in rank order"


def test_a_teacher_scores_a_record_of_another_file_only_for_the_same_text() -> None:
    """Equal ids may belong to other queries, if they are row numbers."""
    selector, teacher = NegativeSelector(MiningSettings()), SimpleNamespace(ranking=lambda query: [("gold", 2.0)])
    vars(selector).update(teacher=teacher)
    record = Example(QUERY, (GOLD,), (PASSAGES[4],))
    same, other = (selector.score_concatenated(record, {"q": text}) for text in (QUERY.text, "another question"))
    assert (same.positive_scores, other.positive_scores) == ((2.0,), ())


def test_a_positive_without_id_is_matched_by_text() -> None:
    training_query = TrainingQuery(QUERY, (Passage("a1b2", GOLD.text),))  # a file without ids gives such an id
    example = NegativeSelector(MiningSettings(margin=0.05, keep=9)).make_example(
        training_query, [PoolResult(RANKING, {})], TEXTS
    )
    assert example is not None
    assert example.positive_scores == (0.9,)
    assert [p.id for p in example.negatives] == ["near", "far"]


def test_a_teacher_scores_a_positive_that_one_pool_found_for_all_pools() -> None:
    """The positive has another id in the corpus, and only the first pool found its text."""
    selector = NegativeSelector(MiningSettings(margin=0.05, keep=9))
    vars(selector).update(teacher=SimpleNamespace(ranking=lambda query: RANKING))
    results = [PoolResult(RANKING[:1], {}), PoolResult(RANKING[2:], {})]
    example = selector.make_example(TrainingQuery(QUERY, (Passage("a1b2", GOLD.text),)), results, TEXTS)
    assert example is not None
    assert example.positive_scores == (0.9,)
    assert [p.id for p in example.negatives] == ["near", "far"]


def test_positives_from_retrieval_are_those_with_an_answer_in_rank_order() -> None:
    chooser = NegativeSelector(MiningSettings(positives_from_retrieval=True, draw="top"))
    example = chooser.make_example(TrainingQuery(QUERY), [FOUND], TEXTS)
    assert example is not None
    assert [p.id for p in example.positives] == ["gold", "copy", "right"]
    assert example.positive_scores == (0.9, 0.9, 0.87)
    assert [p.id for p in example.negatives] == ["near", "far"], "a passage that repeats the question is left out, too"
    nobody = TrainingQuery(Query("q", "where do dogs live?", ("kennel",)), (GOLD,))
    assert chooser.make_example(nobody, [FOUND], TEXTS) is None, "every candidate is judged relevant"
    assert chooser.tally.queries["found no passage with an answer, and are left out"] == 1
    assert chooser.tally.passages == chooser.tally.eligible + sum(chooser.tally.left_out.values()), (
        "every candidate is counted"
    )
