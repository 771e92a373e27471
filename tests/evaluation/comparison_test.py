"""Comparisons of several systems on the same queries: pairing, corrections for many tests, and the printed report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxret.evaluation.comparison import SystemComparison, compare_systems
from jaxret.evaluation.significance import paired_comparison

QUERIES = [f"q{i}" for i in range(12)]


def run(seed: int, shift: float = 0.0) -> dict[str, dict[str, float]]:
    random = np.random.default_rng(seed)
    return {
        name: dict(zip(QUERIES, (random.random(12) * 0.5 + shift).tolist(), strict=True)) for name in ("nDCG@10", "R@5")
    }


SYSTEMS = {"dual": [run(0), run(1)], "mlr": [run(2, 0.3), run(3, 0.25)], "one": [run(4, 0.1)]}


@pytest.fixture(scope="module")
def compared() -> SystemComparison:
    return compare_systems(SYSTEMS, ["nDCG@10", "R@5"], resamples=1000)


def test_means_and_deviations_are_over_runs(compared: SystemComparison) -> None:
    means = [np.mean(list(values["R@5"].values())) for values in SYSTEMS["mlr"]]
    score = compared.score("mlr", "R@5")
    assert score.mean == pytest.approx(np.mean(means))
    assert score.deviation == pytest.approx(abs(means[0] - means[1]) / np.sqrt(2))  # of two: n - 1 is 1
    assert compared.score("one", "R@5").deviation is None


def test_every_system_is_paired_with_the_first_by_the_mean_over_its_runs(compared: SystemComparison) -> None:
    assert [(one.system, one.measure) for one in compared.tests] == [
        (system, measure) for system in ("mlr", "one") for measure in ("nDCG@10", "R@5")
    ]
    mean = {
        name: {q: (sum(run["nDCG@10"][q] for run in SYSTEMS[name])) / len(SYSTEMS[name]) for q in QUERIES}
        for name in ("dual", "mlr")
    }
    expected = paired_comparison(mean["dual"], mean["mlr"], seed=0, resamples=1000)
    assert compared.tests[0].comparison.difference == pytest.approx(expected.difference)
    assert compared.tests[0].comparison.p_t == pytest.approx(expected.p_t)
    assert (compared.tests[0].comparison.wins, compared.tests[0].comparison.losses) == (expected.wins, expected.losses)
    first = paired_comparison(SYSTEMS["dual"][0]["nDCG@10"], SYSTEMS["mlr"][0]["nDCG@10"], seed=0, resamples=1000)
    assert compared.tests[0].comparison.p_t != pytest.approx(first.p_t), "not of the first seeds alone"


def test_holm_counts_every_test_of_the_table(compared: SystemComparison) -> None:
    p, corrected = min((one.comparison.p_t, one.holm_t) for one in compared.tests if one.comparison.p_t is not None)
    assert corrected == pytest.approx(min(1.0, 4 * p))
    alone = compare_systems({name: SYSTEMS[name] for name in ("dual", "mlr")}, ["R@5"], resamples=1000)
    assert alone.tests[0].holm_t == alone.tests[0].comparison.p_t
    drawn = min(compared.tests, key=lambda one: one.comparison.p_permutation)
    assert drawn.holm_permutation == pytest.approx(min(1.0, 4 * drawn.comparison.p_permutation)), "of its own column"


def test_only_systems_of_several_runs_are_tested_over_runs(compared: SystemComparison) -> None:
    assert [one.p_runs is None for one in compared.tests] == [False, False, True, True]


def test_text_markdown_and_json_say_the_same(compared: SystemComparison) -> None:
    text, markdown, values = compared.to_text(), compared.to_markdown(), json.loads(json.dumps(compared.to_json()))
    difference = f"{compared.tests[0].comparison.difference:+.4f}"
    for report in (text, markdown):
        assert difference in report
        assert str(compared.score("dual", "R@5")) in report
        assert "Minus dual, query by query:" in report
        assert (
            "Holm corrects the column on its left for all 4 tests of this table; over runs is not corrected" in report
        )
        assert "Means over 12 queries." in report
    assert "| system | runs | nDCG@10 | R@5 |\n| :-- | --: | --: | --: |\n" in markdown
    assert values["baseline"] == "dual"
    assert values["systems"]["mlr"]["R@5"]["runs"] == list(compared.score("mlr", "R@5").runs)
    first = values["tests"][0]
    assert (first["wins"], first["ties"], first["losses"]) == (
        compared.tests[0].comparison.wins,
        compared.tests[0].comparison.ties,
        compared.tests[0].comparison.losses,
    )


def test_one_system_has_means_alone() -> None:
    text = compare_systems({"dual": SYSTEMS["dual"]}, ["R@5"]).to_text()
    assert "±" in text
    assert "nothing to compare it with" in text


def test_runs_on_other_queries_are_refused() -> None:
    other = {"R@5": {**run(5)["R@5"], "extra": 1.0}}
    for systems in ({"dual": SYSTEMS["dual"], "x": [run(5), other]}, {"x": [run(5), other]}):
        with pytest.raises(ValueError, match="query 'extra' has a R@5 in run 2 of x, but none in run 1 of "):
            compare_systems(systems, ["R@5"])


def test_measures_of_fewer_queries_are_counted() -> None:
    some = [{**run, "Accuracy@5": dict.fromkeys(QUERIES[:9], 0.5)} for run in SYSTEMS["dual"]]
    comparison = compare_systems({"dual": some}, ["R@5", "Accuracy@5"])
    assert "Means over 12 queries (R@5); 9 queries (Accuracy@5)." in comparison.to_text()
    assert comparison.to_json()["queries"] == {"R@5": 12, "Accuracy@5": 9}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shift", [0.0, 0.25, 0.1])
def test_differences_that_are_all_equal_have_no_t_test(shift: float) -> None:
    values = {query: place / 30 for place, query in enumerate(QUERIES)}
    other = {query: value + shift for query, value in values.items()}  # of 0.1, equal but for rounding
    comparison = compare_systems(
        {"a": [{"R@5": values}], "b": [{"R@5": other}], "c": [run(4)]}, ["R@5"], resamples=5000
    )
    row, ordinary = json.loads(json.dumps(comparison.to_json(), allow_nan=False))["tests"]
    assert row["difference"] == pytest.approx(shift)
    assert [row[key] for key in ("t", "p_t", "holm_t")] == [None] * 3
    assert row["p_permutation"] == (2 / 2**12 if shift else 1)
    assert ordinary["holm_t"] == min(1.0, 2 * ordinary["p_t"]), "what has no value is a test that was asked for"
    assert "There is no t-test where all differences are equal." in comparison.to_text()
    assert "No t-test" not in compare_systems(SYSTEMS, ["R@5"], resamples=100).to_text()
