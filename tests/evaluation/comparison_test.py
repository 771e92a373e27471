"""Comparisons of several systems on the same queries: pairing, corrections for multiple tests, and the printed
report."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from jaxret.evaluation.comparison import SystemComparison, compare_systems, correct_together
from jaxret.evaluation.comparison_table import csv_table, latex_table, mean_score, sets_table
from jaxret.evaluation.significance import holm, paired_comparison
from jaxret.evaluation.text_table import markdown_table

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
    assert score.deviation == pytest.approx(abs(means[0] - means[1]) / np.sqrt(2))  # with two seeds, n - 1 is 1
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
    assert compared.tests[0].comparison.p_t != pytest.approx(first.p_t), "all seeds count, not only the first"


def test_holm_counts_every_test_of_the_table(compared: SystemComparison) -> None:
    p, corrected = min((one.comparison.p_t, one.holm_t) for one in compared.tests if one.comparison.p_t is not None)
    assert corrected == pytest.approx(min(1.0, 4 * p))
    alone = compare_systems({name: SYSTEMS[name] for name in ("dual", "mlr")}, ["R@5"], resamples=1000)
    assert alone.tests[0].holm_t == alone.tests[0].comparison.p_t
    drawn = min(compared.tests, key=lambda one: one.comparison.p_permutation)
    assert drawn.holm_permutation == pytest.approx(min(1.0, 4 * drawn.comparison.p_permutation)), (
        "the correction is that of its column"
    )


def test_only_systems_of_several_runs_are_tested_over_runs(compared: SystemComparison) -> None:
    assert [one.p_runs is None for one in compared.tests] == [False, False, True, True]


def test_text_markdown_and_json_have_the_same_values(compared: SystemComparison) -> None:
    text, markdown, values = (
        compared.to_text(),
        compared.to_text(markdown_table),
        json.loads(json.dumps(compared.to_json())),
    )
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


def test_one_system_has_only_means() -> None:
    text = compare_systems({"dual": SYSTEMS["dual"]}, ["R@5"]).to_text()
    assert "±" in text
    assert "nothing to compare it with" in text


def test_one_query_has_means_and_no_test() -> None:
    values = {"a": [{"RR@10": {"q": 0.5}}], "b": [{"RR@10": {"q": 1.0}}]}
    compared = compare_systems(values, ["RR@10"])
    assert (compared.score("a", "RR@10").mean, compared.score("b", "RR@10").mean) == (0.5, 1.0)
    assert not compared.tests
    assert compared.to_text().endswith("Means over 1 query.\n\nOne query: there is nothing to test.")


def test_runs_on_other_queries_are_refused() -> None:
    other = {"R@5": {**run(5)["R@5"], "extra": 1.0}}
    for systems in ({"dual": SYSTEMS["dual"], "x": [run(5), other]}, {"x": [run(5), other]}):
        with pytest.raises(ValueError, match=r"query 'extra' .*R@5 .*2 .*x, .*1"):
            compare_systems(systems, ["R@5"])


def test_measures_of_fewer_queries_are_counted() -> None:
    some = [{**run, "Accuracy@5": dict.fromkeys(QUERIES[:9], 0.5)} for run in SYSTEMS["dual"]]
    comparison = compare_systems({"dual": some}, ["R@5", "Accuracy@5"])
    assert "Means over 12 queries (R@5); 9 queries (Accuracy@5)." in comparison.to_text()
    assert comparison.to_json()["queries"] == {"R@5": 12, "Accuracy@5": 9}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shift", [0.0, 0.25, 0.1])
def test_equal_differences_have_no_t_test(shift: float) -> None:
    values = {query: place / 30 for place, query in enumerate(QUERIES)}
    # A shift of 0.1 is equal for all queries, except for rounding.
    other = {query: value + shift for query, value in values.items()}
    comparison = compare_systems(
        {"a": [{"R@5": values}], "b": [{"R@5": other}], "c": [run(4)]}, ["R@5"], resamples=5000
    )
    row, ordinary = json.loads(json.dumps(comparison.to_json(), allow_nan=False))["tests"]
    assert row["difference"] == pytest.approx(shift)
    assert [row[key] for key in ("t", "p_t", "holm_t")] == [None] * 3
    assert row["p_permutation"] == (2 / 2**12 if shift else 1)
    tests = 2 if shift else 1  # an undefined t-test counts; equal systems are not tested
    assert ordinary["holm_t"] == min(1.0, tests * ordinary["p_t"])
    assert f"for all {tests} tests of this table" in comparison.to_text()
    assert "There is no t-test if all differences are equal, and no test if they are zero." in comparison.to_text()
    assert row["holm_permutation"] is None if not shift else row["holm_permutation"] > 0
    assert "No t-test" not in compare_systems(SYSTEMS, ["R@5"], resamples=100).to_text()


SETS = correct_together(
    {name: compare_systems(SYSTEMS, ["nDCG@10", "R@5"], resamples=1000) for name in ("scifact.test", "fiqa_test")}
)


def test_tests_of_several_sets_are_corrected_together() -> None:
    alone = compare_systems(SYSTEMS, ["nDCG@10", "R@5"], resamples=1000)
    for one in SETS.values():
        for test, before in zip(one.tests, alone.tests, strict=True):
            assert test.comparison == before.comparison
    every = [test for one in SETS.values() for test in one.tests]
    expected = holm([test.comparison.p_permutation for test in every])
    assert [test.holm_permutation for test in every] == pytest.approx(expected)
    assert expected != pytest.approx([test.holm_permutation for test in alone.tests] * 2), (
        "control: a correction within each set differs"
    )


def test_several_sets_are_one_table_with_their_mean() -> None:
    text = sets_table(SETS, markdown_table)
    assert "| nDCG@10 | scifact.test | fiqa_test | mean |" in text
    scores = [one.score("mlr", "nDCG@10") for one in SETS.values()]
    mean = mean_score([scores[0], replace(scores[1], runs=tuple(run + 0.1 for run in scores[1].runs))])
    assert mean.runs == pytest.approx([run + 0.05 for run in scores[0].runs])
    assert f"| mlr | {scores[0]} | {scores[1]} | {mean_score(scores)} |" in text
    assert text.count("| scifact.test | mlr | nDCG@10 |") == 1


def test_csv_has_all_numbers() -> None:
    lines = list(csv.DictReader(csv_table(SETS).splitlines()))
    assert len(lines) == 2 * len(SYSTEMS) * 2
    line = next(one for one in lines if (one["data"], one["system"], one["measure"]) == ("fiqa_test", "mlr", "R@5"))
    (test,) = (one for one in SETS["fiqa_test"].tests if (one.system, one.measure) == ("mlr", "R@5"))
    assert float(line["mean"]) == SETS["fiqa_test"].score("mlr", "R@5").mean
    assert float(line["difference"]) == test.comparison.difference
    assert float(line["holm_permutation"]) == test.holm_permutation
    assert {one["difference"] for one in lines if one["system"] == "dual"} == {""}


def test_latex() -> None:
    values = {query: place / 30 for place, query in enumerate(QUERIES)}
    better = {query: value + 0.25 + place / 300 for place, (query, value) in enumerate(values.items())}
    comparison = compare_systems({"a_1": [{"R@5": values}], "b & c": [{"R@5": better}]}, ["R@5"], resamples=5000)
    assert latex_table({"x": comparison}).splitlines() == [
        "% x",
        "% bold: the best. dagger: not a_1's, p < 0.05 (randomization, Holm, 1 tests)",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"system & R@5 \\",
        r"\midrule",
        r"a\_1 & 0.1833 \\",
        r"b \& c & \textbf{0.4517}$^\dagger$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    both = latex_table(SETS)
    assert both.count(r"system & scifact.test & fiqa\_test & mean \\") == 2
    assert r"$\pm$" in both


def test_a_notebook_shows_the_tables_of_a_comparison(compared: SystemComparison) -> None:
    shown = compared._repr_html_()
    assert shown.count("<table>") == 2
    assert str(compared.score("mlr", "R@5")) in shown
    assert "<p>Minus dual, query by query:</p>" in shown
    named = compare_systems({"<b>": SYSTEMS["dual"]}, ["R@5"])
    assert "&lt;b&gt;" in named._repr_html_()
