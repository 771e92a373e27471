"""Measures against ir_measures (pytrec_eval) on random graded data, against the official MS MARCO script, and by
hand."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import ir_measures
import pytest

from jaxret.data.records import Judgement
from jaxret.evaluation.metrics import Evaluation, evaluate, parse_measure

MEASURES = (
    "nDCG@1", "nDCG@10", "nDCG", "RR@1", "RR@10", "RR", "R@1", "R@5", "R@100", "Success@1", "Success@20", "AP", "AP@5",
    "AP(rel=2)", "RR(rel=2)@10", "R(rel=2)@5", "Success(rel=3)@5",
)  # fmt: skip
Run = dict[str, list[tuple[str, float]]]


def random_case(seed: int) -> tuple[Run, list[Judgement]]:
    """Graded judgements with queries that are missing, unjudged, without results, or without a relevant passage; no
    ties."""
    rng = random.Random(seed)
    passages = [f"p{i}" for i in range(60)]
    run: Run = {}
    judgements = []
    for query in (f"q{i}" for i in range(40)):
        kind = rng.choice(["usual"] * 6 + ["missing", "unjudged", "empty", "nothing relevant"])
        if kind != "unjudged":
            grades = [0] if kind == "nothing relevant" else [-1, 0, 0, 1, 2, 3]
            judged = rng.sample(passages, rng.randint(1, 30))
            judgements += [Judgement(query, passage, rng.choice(grades)) for passage in judged]
        if kind != "missing":
            retrieved = [] if kind == "empty" else rng.sample(passages, rng.randint(1, 50))
            run[query] = [(passage, float(100 - rank)) for rank, passage in enumerate(retrieved)]
    return run, judgements


def oracle(run: Run, judgements: list[Judgement], measures: tuple[str, ...]) -> Any:
    parsed = [ir_measures.parse_measure(name) for name in measures]
    qrels: dict[str, dict[str, int]] = {}
    for judgement in judgements:
        qrels.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    return ir_measures.evaluator(parsed, qrels).calc({query: dict(ranking) for query, ranking in run.items()})


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_ir_measures(seed: int) -> None:
    run, judgements = random_case(seed)
    ours, theirs = evaluate(run, judgements, MEASURES), oracle(run, judgements, MEASURES)
    expected = {str(measure): value for measure, value in theirs.aggregated.items()}
    assert ours.mean == pytest.approx(expected, abs=1e-9)
    assert len(set(expected.values())) > len(MEASURES) / 2  # control: most measures have different values
    for metric in theirs.per_query:
        assert ours.per_query[str(metric.measure)][metric.query_id] == pytest.approx(metric.value, abs=1e-9)
    assert len(list(theirs.per_query)) == sum(map(len, ours.per_query.values()))


def test_control_another_ranking_is_not_equal() -> None:
    run, judgements = random_case(0)
    expected = {str(measure): value for measure, value in oracle(run, judgements, MEASURES).aggregated.items()}
    ranking = next(ranking for ranking in run.values() if len(ranking) > 1)
    scores = [score for _, score in ranking]
    run["q0"] = list(zip([passage for passage, _ in reversed(ranking)], scores))
    assert evaluate(run, judgements, MEASURES).mean != pytest.approx(expected, abs=1e-9)


def test_ties_keep_the_order_of_the_ranking() -> None:
    """trec_eval would put "b" first, because it sorts ties by descending id."""
    run: Run = {"q": [("a", 1.0), ("b", 1.0)]}
    judgements = [Judgement("q", "a", 1)]
    assert evaluate(run, judgements, ["RR"]).mean == {"RR": 1.0}
    assert oracle(run, judgements, ("RR",)).aggregated == {ir_measures.RR: 0.5}


def test_reciprocal_rank_equals_the_official_ms_marco_script() -> None:
    """The script's logic: the first relevant of ten ranks adds 1 / rank; the sum is divided by the number of judged
    queries."""
    run, judgements = random_case(7)
    relevant: dict[str, set[str]] = {}
    for judgement in judgements:
        relevant.setdefault(judgement.query_id, set()).update([judgement.passage_id] * (judgement.relevance > 0))
    total = 0.0
    for query, ranking in run.items():
        if query in relevant:
            for i in range(min(10, len(ranking))):
                if ranking[i][0] in relevant[query]:
                    total += 1 / (i + 1)
                    break
    assert evaluate(run, judgements, ["RR@10"]).mean["RR@10"] == pytest.approx(total / len(relevant), rel=1e-12)
    # Control: dividing by the number of queries with results would differ.
    assert len(relevant) != len(run.keys() & relevant.keys())


def test_by_hand() -> None:
    run: Run = {"q": [("x", 9.0), ("a", 8.0), ("b", 7.0)]}
    judgements = [Judgement("q", "a", 1), Judgement("q", "b", 3), Judgement("q", "c", 2), Judgement("q", "x", 0)]
    mean = evaluate(run, judgements, ["nDCG@3", "RR@10", "R@2", "Success@1", "Success@2", "AP"]).mean
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert mean["nDCG@3"] == pytest.approx((1 / math.log2(3) + 3 / 2) / ideal)
    assert mean["RR@10"] == 1 / 2
    assert mean["R@2"] == pytest.approx(1 / 3)
    assert (mean["Success@1"], mean["Success@2"]) == (0, 1)
    assert mean["AP"] == pytest.approx((1 / 2 + 2 / 3) / 3)


def test_judged_queries_and_queries_with_results_are_counted() -> None:
    judgements = [Judgement("found", "a", 1), Judgement("missing", "a", 1), Judgement("empty", "a", 1)]
    judgements.append(Judgement("nothing relevant", "a", 0))
    run: Run = {"found": [("a", 1.0)], "empty": [], "unjudged": [("a", 1.0)]}
    evaluation = evaluate(run, judgements, ["Success@1"])
    assert (evaluation.queries_expected, evaluation.queries_found) == (4, 1)
    assert evaluation.mean == {"Success@1": 0.25}
    assert evaluation.per_query["Success@1"] == {"found": 1, "missing": 0, "empty": 0, "nothing relevant": 0}


def test_an_empty_run_scores_zero() -> None:
    evaluation = evaluate({}, [Judgement("q", "a", 1)], MEASURES)
    assert set(evaluation.mean.values()) == {0.0}
    assert evaluation.queries_found == 0


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        ([("a", 3.0), ("b", 2.0), ("a", 1.0)], "query 'q' retrieves passage 'a' twice"),
        ([("a", math.nan)], r"'q', .*1, passage 'a': .*NaN"),
        ([("a", 2.0), ("b", 1.0), ("c", math.nan)], r"'q', .*3, passage 'c': .*NaN"),
        ([("a", math.nan), ("b", 1.0)], r"'q', .*1, passage 'a': .*NaN"),
        ([("a", 2.0), ("b", 1.0), ("c", 1.5)], r"'q', .*3, passage 'c': .*1.5 .*1.0"),
    ],
)
def test_a_broken_ranking_is_an_error(ranking: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate({"q": ranking}, [Judgement("q", "a", 1)], ["RR"])


def test_infinite_scores_are_scores() -> None:
    ranking = [("a", math.inf), ("b", 0.0), ("c", -math.inf), ("d", -math.inf)]
    assert evaluate({"q": ranking}, [Judgement("q", "d", 1)], ["RR"]).mean == {"RR": 1 / 4}


def test_judgements_must_exist_agree_and_belong_to_the_run() -> None:
    with pytest.raises(ValueError, match="no judgements"):
        evaluate({"q": [("a", 1.0)]}, [], ["RR"])
    with pytest.raises(ValueError, match="query 'q' judges passage 'a' 1 and 2"):
        evaluate({}, [Judgement("q", "a", 1), Judgement("q", "a", 2)], ["RR"])
    with pytest.raises(ValueError, match=r"1 queries .*'other'.*'q'"):
        evaluate({"other": [("a", 1.0)]}, [Judgement("q", "a", 1)], ["RR"])
    repeated = [Judgement("q", "a", 1), Judgement("q", "a", 1)]
    assert evaluate({"q": [("a", 1.0)]}, repeated, ["R@1"]).mean == {"R@1": 1.0}


@pytest.mark.parametrize("name", MEASURES)
def test_names_are_those_of_ir_measures(name: str) -> None:
    assert parse_measure(name).name == str(ir_measures.parse_measure(name)) == name


@pytest.mark.parametrize(
    "name", ["MRR@10", "ndcg@10", "nDCG@0", "nDCG@", "nDCG@-1", "nDCG 10", "", "nDCG@10 ", "R@1.5"]
)
def test_an_unknown_name_is_an_error_that_lists_the_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown measure .*the measures are nDCG@k, RR@k"):
        parse_measure(name)


@pytest.mark.parametrize(("name", "reason"), [("R", "cut-off"), ("Success", "cut-off"), ("nDCG(rel=2)@5", "graded")])
def test_an_impossible_name_is_an_error(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}.*the measures are"):
        parse_measure(name)


def test_json_rounds_means_and_keeps_values_per_query() -> None:
    evaluation = Evaluation({"RR": 0.123456}, {"RR": {"q": 0.123456}}, queries_expected=3, queries_found=1)
    expected = {"mean": {"RR": 0.1235}, "queries_expected": 3, "queries_found": 1}
    assert json.loads(json.dumps(evaluation.to_json())) == expected | {"per_query": {"RR": {"q": 0.123456}}}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MRR@10", "RR@10"), ("NDCG@10", "nDCG@10"), ("ndcg_cut_10", "nDCG@10"), ("recall_100", "R@100"),
        ("recall_at_100", "R@100"), ("map", "AP"), ("hit_rate@5", "Success@5"), ("recall", "R@k"), ("P@10", ""),
    ],
)  # fmt: skip
def test_measure_names_of_other_libraries_get_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'; .*R@k.*{f'; did you mean {meant}[?]' if meant else ''}$"):
        parse_measure(name)
