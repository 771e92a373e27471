"""A second reading of the papers: every constant that they state equals that of a row of `jaxret reproduce`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from jaxret.configs import change_config, load_config
from jaxret.experiments.recipes.stages import read_stages
from jaxret.experiments.reproduce.papers import Case, PaperRow, paper_rows

READING = tomllib.loads((Path(__file__).parent / "paper_constants.toml").read_text("utf-8"))
GROUPS: list[dict[str, Any]] = READING["groups"]
UNSTATED: list[str] = READING["unstated"]["rows"]
ROWS = [row for row in paper_rows().values() if row.config and row.runnable]


def case_id(case: Case) -> str:
    return f"{case.row.id}@{case.source.name}"


def stated(case: Case) -> dict[tuple[str, str], tuple[Any, str]]:
    """Map (stage, key) to the recipe's value, and to the place in the paper, or the reason for a difference."""
    constants: dict[tuple[str, str], tuple[Any, str]] = {}
    for group in GROUPS:
        if any(fnmatchcase(case_id(case), pattern) for pattern in group["rows"]):
            stage = group.get("stage", "")
            for key, value, where in group["values"]:
                constants[stage, key] = (value, where)
            for key, paper, recipe, why in group.get("differs", []):
                assert paper != recipe, (key, why)
                constants[stage, key] = (recipe, why)
    return constants


def actual(case: Case, stage: str, keys: list[str]) -> Iterator[Any]:
    """Yield the recipe's values of keys. Keys of a config belong to `stage`, or to the stage that the row measures."""
    row = case.row
    if row.verb == "recipe":
        (read,) = [one for one in read_stages(case.config, dict(row.set)) if one.name == (stage or row.stage)]
        config, mining = read.config, {"pools": read.pools, "concat": read.concat, **vars(read.mining or object)}
    else:
        config, mining = change_config(load_config(case.config), dict(row.set), case.config), {}
    values = config.to_dict()
    for key in keys:
        group, _, name = key.partition(".")
        if group == "row":
            yield case.checkpoint if name == "checkpoint" else getattr(row, name)
        elif group == "mine":
            yield mining[name]
        else:
            yield reduce(getitem, key.split("."), values)


def agrees(value: Any, paper: Any) -> bool:
    if isinstance(paper, str):
        return fnmatchcase(value, paper)
    return list(value) == paper if isinstance(paper, list) else bool(value == paper)


def disagreements(case: Case) -> Iterator[str]:
    constants = stated(case)
    for stage in {stage for stage, _ in constants}:
        keys = [key for name, key in constants if name == stage]
        for key, value in zip(keys, actual(case, stage, keys), strict=True):
            paper, where = constants[stage, key]
            if not agrees(value, paper):
                yield f"{case_id(case)} {stage or case.row.stage}: {key} is {value!r}, {where} has {paper!r}"


def is_unstated(row: PaperRow) -> bool:
    return any(fnmatchcase(row.id, pattern) for pattern in UNSTATED)


@pytest.mark.parametrize("row", [row for row in ROWS if not is_unstated(row)], ids=lambda row: row.id)
def test_a_row_has_the_constants_of_its_paper(row: PaperRow) -> None:
    for case in row.cases():
        assert stated(case), f"{case_id(case)} is missing in paper_constants.toml"
        assert list(disagreements(case)) == []


def test_every_pattern_of_the_reading_names_a_row() -> None:
    """A misspelt pattern would compare nothing."""
    names = [case_id(case) for row in paper_rows().values() if row.config for case in row.cases()]
    rows = [row.id for row in paper_rows().values()]
    for group in GROUPS:
        for pattern in group["rows"]:
            every = rows if pattern == "aggretriever/8/average*" else names
            assert any(fnmatchcase(name, pattern) for name in every), pattern
    for pattern in UNSTATED:
        assert any(fnmatchcase(row, pattern) for row in rows), pattern


def test_a_wrong_constant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = paper_rows()["mlr/3/mlr"].cases()[0]
    wrong = [["optimizer.learning_rate", 3e-5, "nowhere"], ["mine.keep", 5, "nowhere"], ["row.seeds", 4, "nowhere"]]
    monkeypatch.setitem(globals(), "GROUPS", [*GROUPS, {"rows": ["mlr/3/mlr@nq"], "values": wrong}])
    assert sorted(disagreements(case)) == [
        "mlr/3/mlr@nq stage2: mine.keep is 50, nowhere has 5",
        "mlr/3/mlr@nq stage2: optimizer.learning_rate is 5e-06, nowhere has 3e-05",
        "mlr/3/mlr@nq stage2: row.seeds is 5, nowhere has 4",
    ]
