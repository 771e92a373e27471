"""Names of measures: two kinds with a default each; none may be deeper than the rankings."""

from __future__ import annotations

import pytest

from jaxret.data.records import Query
from jaxret.experiments.searches.evaluate_search import require_answers
from jaxret.experiments.searches.evaluation_measures import ANSWER_CUTOFFS, MEASURES, choose_measures


def test_each_kind_of_measure_replaces_its_own_default() -> None:
    assert choose_measures(None, 100).names == MEASURES
    assert choose_measures(None, 100).cutoffs == ANSWER_CUTOFFS == (1, 5, 20, 100)
    assert choose_measures(None, 7).cutoffs == (1, 5)
    mixed = choose_measures(["Accuracy@50", "nDCG@3", "Accuracy@2"], 50)
    assert (mixed.names, mixed.cutoffs, mixed.answers_needed) == (("nDCG@3",), (50, 2), True)
    judged = choose_measures(["RR"], 5)
    assert (judged.names, judged.cutoffs, judged.answers_needed) == (("RR",), (1, 5), False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Accuracy@21", "Accuracy@21 needs --k=21 or more; only 20 passages"),
        ("Accuracy@0", r"unknown .*'Accuracy@0'; .*Accuracy@k"),
        ("Accuracy@", r"unknown measure 'Accuracy@'"),
        ("Accuracy", "unknown measure 'Accuracy'"),
        ("R@21", "R@21 needs --k=21"),
    ],
)
def test_a_bad_name_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_measures(["nDCG@10", name], 20)


def test_accuracy_needs_answers() -> None:
    queries = [Query("q", "text")]
    require_answers("data", queries, choose_measures(["nDCG@10"], 20))
    with pytest.raises(ValueError, match=r"Accuracy@1 .*answers, .*Success@1"):
        require_answers("data", queries, choose_measures(["Accuracy@1"], 20))
    require_answers("data", [*queries, Query("r", "text", ("a",))], choose_measures(["Accuracy@1"], 20))
