"""The results table, as text and Markdown, and the evaluation file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxret.evaluation.evaluation_report import (
    evaluation_markdown,
    evaluation_text,
    footer,
    read_evaluation,
    write_evaluation,
)
from jaxret.evaluation.metrics import Evaluation
from jaxret.storage.atomic import read_json


def evaluation(ranked: int = 300, expected: int = 300, **mean: float) -> Evaluation:
    return Evaluation(mean, {name: {"q": value} for name, value in mean.items()}, expected, ranked)


SYSTEMS = {"BM25": evaluation(nDCG=0.6788, R=0.9), "MLR, 2 layers": evaluation(nDCG=0.70001, R=0.89996)}


def test_text_is_aligned_and_marks_the_best() -> None:
    assert evaluation_text(SYSTEMS) == (
        "system           nDCG        R\n"
        "-------------  -------  -------\n"
        "BM25           0.6788   0.9000*\n"
        "MLR, 2 layers  0.7000*  0.9000*\n"
        "\n"
        "Queries found: 300 of 300 expected."
    )


def test_markdown_is_a_table_with_the_best_in_bold() -> None:
    assert evaluation_markdown(SYSTEMS | {"a|b": evaluation(nDCG=0.0, R=1.0)}) == (
        "| system | nDCG | R |\n"
        "| :-- | --: | --: |\n"
        "| BM25 | 0.6788 | 0.9000 |\n"
        "| MLR, 2 layers | **0.7000** | 0.9000 |\n"
        "| a\\|b | 0.0000 | **1.0000** |\n"
        "\n"
        "Queries found: 300 of 300 expected."
    )


def test_one_system_has_no_best() -> None:
    one = {"BM25": evaluation(nDCG=0.5)}
    assert "*" not in evaluation_text(one) + evaluation_markdown(one)


def test_the_footer_names_systems_with_missing_queries() -> None:
    assert footer({"a": evaluation(299, R=0.5), "b": evaluation(299, R=0.5)}) == (
        "Queries found: 299 of 300 expected; the missing ones count as zero."
    )
    assert footer({"a": evaluation(299, R=0.5), "b": evaluation(300, R=0.5)}) == (
        "Queries found, a: 299 of 300 expected; the missing ones count as zero.\nQueries found, b: 300 of 300 expected."
    )


def test_the_file_has_the_evaluation_and_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "scifact.test.json"
    provenance = {"seed": 7, "versions": {"jax": "0.10.2"}}
    write_evaluation(path, evaluation(299, R=0.123456), provenance)
    expected = {
        "mean": {"R": 0.1235},
        "queries_expected": 300,
        "queries_found": 299,
        "per_query": {"R": {"q": 0.123456}},
        "provenance": provenance,
    }
    assert read_json(path) == expected
    write_evaluation(path, evaluation(299, R=0.123456), provenance, evaluation(300, Accuracy=1.0))
    assert read_json(path)["answers"]["mean"] == {"Accuracy": 1.0}
    assert read_json(path) == expected | {"answers": read_json(path)["answers"]}


@pytest.mark.parametrize("judged", [True, False])
def test_accuracy_states_its_number_of_queries(judged: bool, tmp_path: Path) -> None:
    answers = replace(evaluation(90, 90, **{"Accuracy@5": 0.5}), answer_counts=(90, 100))
    if judged:
        write_evaluation(tmp_path / "a.json", evaluation(100, 100, R=0.5), {}, answers)
    else:
        write_evaluation(tmp_path / "a.json", answers, {})
    stored = read_json(tmp_path / "a.json")
    part = stored["answers"] if judged else stored
    assert (part["queries_expected"], part["queries_asked"]) == (90, 100)
    assert footer({"a": read_evaluation(tmp_path / "a.json")}).endswith(
        "Accuracy@k: of the 90 of 100 queries that have answers."
    )
    everywhere = replace(answers, answer_counts=(90, 90))
    assert "Accuracy" not in footer({"a": everywhere, "b": evaluation(90, 90, R=1.0)})


def test_an_evaluation_round_trips(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "a.json", evaluation(299, R=0.25), {}, evaluation(299, Accuracy=1.0))
    assert read_evaluation(tmp_path / "a.json") == evaluation(299, R=0.25, Accuracy=1.0)
    write_evaluation(tmp_path / "a.json", evaluation(299, R=0.25), {})
    assert read_evaluation(tmp_path / "a.json") == evaluation(299, R=0.25)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json .*evaluation .*KeyError\('mean'\)"):
        read_evaluation(tmp_path / "a.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "scifact.test.json"
    write_evaluation(path, evaluation(R=0.5), {"seed": 7})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_evaluation(path, evaluation(R=0.5), {"loss": float("nan")})
    assert read_json(path)["provenance"] == {"seed": 7}
    assert list(tmp_path.iterdir()) == [path]


def test_a_notebook_shows_a_table() -> None:
    shown = evaluation(299, R=0.25)._repr_html_()
    assert shown.startswith("<table><thead>")
    assert '<td style="text-align:left">R</td><td style="text-align:right">0.2500</td>' in shown
    assert "<p>Queries found: 299 of 300 expected.</p>" in shown
