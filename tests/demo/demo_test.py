"""The tables of the demo and the configs of its systems."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from jaxret.data.formats import write_beir, write_run
from jaxret.data.records import Judgement, Passage, Query
from jaxret.demo.demo import ROW_MEASURE, SYSTEMS, DemoData, change_table, demo_config, show_answers
from jaxret.evaluation.metrics import Evaluation
from jaxret.evaluation.text_table import aligned_table, markdown_table
from jaxret.training.config_check import check_config

QUERIES = [f"q{number}" for number in range(60)]


def evaluation(values: np.ndarray) -> Evaluation:
    return Evaluation({ROW_MEASURE: values.mean()}, {ROW_MEASURE: dict(zip(QUERIES, values.tolist()))}, 60, 60)


@pytest.fixture
def table() -> dict[str, Evaluation]:
    """The second row is better than the first, the third equals the second, the fourth is slightly better than the
    third."""
    rng = np.random.default_rng(3)
    first = rng.uniform(0, 0.5, 60)
    better = first + rng.uniform(0, 0.4, 60)
    noise = rng.normal(size=60)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    # The statistic is 2.2: p = 0.03 is significant alone, but not as one of three.
    little = better + 0.05 * (noise + 2.2 / np.sqrt(60))
    return {"a": evaluation(first), "b": evaluation(better), "c": evaluation(better), "d": evaluation(little)}


def test_every_row_is_compared_with_the_one_above(table: dict[str, Evaluation]) -> None:
    text = change_table(table, ["one", "two", "three"], markdown_table)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:5]]
    rows = [np.array(list(one.per_query[ROW_MEASURE].values())) for one in table.values()]
    assert [row[:2] for row in cells] == [["b", "one"], ["c", "two"], ["d", "three"]]
    assert [row[2] for row in cells] == [
        f"{(after - before).mean():+.4f}" for before, after in itertools.pairwise(rows)
    ]
    assert [row[5] for row in cells] == ["yes", "no", "no"]
    alone = stats.ttest_rel(rows[3], rows[2]).pvalue  # close to the randomization test on 60 values
    assert 0.05 / 3 < alone < 0.05, "control: without the correction it would be significant"
    # Holm multiplies the second smallest of three p-values by 2.
    assert float(cells[2][4]) == pytest.approx(2 * alone, rel=0.15)
    assert "over 60 questions" in text
    assert "for 3 tests" in text
    assert "yes" not in change_table({"a": table["b"], "b": table["c"]}, ["one"], aligned_table)


def test_every_system_is_a_config_with_a_description(tmp_path: Path) -> None:
    for system in SYSTEMS:
        config = demo_config(system.config, tmp_path, {"train.steps": 7})
        check_config(config)
        assert config.train.steps == ("{steps}" in system.change or system.config == "mlr") * 7
        assert (config.encoder.layers == 5) == (system.config != "as_it_comes")
        assert "{" not in system.change.format(steps=1, pairs=2)


def test_answers_are_from_the_demos_own_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other searches of the run do not change them."""
    passages = [Passage("a", "a text"), Passage("b", "another text")]
    question = Query("q", "which text?")
    write_beir(tmp_path / "python-docs", passages, [question], {"test": [Judgement("q", "b", 1)]})
    for name, answer in (("python-docs.test", "b"), ("mine", "a")):
        write_run(tmp_path / "runs" / f"{name}.trec", {"q": [(answer, 0.5)]}, tag="test")
    data = DemoData(tmp_path / "python-docs", tmp_path, passages, [question], [])
    show_answers(tmp_path, data, [question])
    assert "another text" in capsys.readouterr().out
