"""The stages of a config: what they may say, what is done once, and what is done again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import read_examples
from jaxret.mining.filters import Settings
from jaxret.shipped import names, stages
from jaxret.storage import read_sealed
from jaxret.tools.ledger import Ledger
from jaxret.tools.recipe import Evaluated, read_stages, run_recipe
from tests.pipeline import REPOSITORY, train_arguments, write_data, write_encoder

CONFIG = """from configs.base import get_config, two_stages


def stages():
    return {stages}
"""


class Steps:
    """A step that writes a file, and how often it was done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done, self.said = folder, 0, []  # type: ignore[var-annotated]
        self.ledger = Ledger(folder, self.said.append)

    def do(self, made_from: Any = 1, fails: bool = False) -> dict[str, str]:
        def make() -> list[Path]:
            self.done += 1
            (self.folder / "made").write_text(f"{made_from}")
            if fails:
                raise OSError("full")
            return [self.folder / "made"]

        return self.ledger.do("step", made_from, make)


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    first = steps.do()
    assert first == steps.do() == Steps(tmp_path).do()
    assert steps.done == 1
    assert steps.said == ["== step", "== step: done already"]
    assert set(first) == {"made"}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "made").unlink(), "its files changed"),
        (lambda folder: (folder / "made").write_text("other"), "its files changed"),
        (lambda folder: (folder / "done/step.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "done/step.json").write_text("{}"), "is damaged"),
        (lambda folder: (folder / "done/step.json").unlink(), "== step"),
    ],
)
def test_what_was_spoiled_is_done_again(spoil: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    first = steps.do()
    spoil(tmp_path)
    assert steps.do() == first
    assert steps.done == 2
    assert told in steps.said[-1]


def test_other_inputs_and_a_step_that_failed(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert steps.do(1) != steps.do(2)
    assert (steps.done, steps.said[-1]) == (2, "== step: again, for its inputs changed")
    with pytest.raises(OSError, match="full"):
        steps.do(3, fails=True)
    steps.do(3)
    assert steps.done == 4


def test_every_recipe_says_its_stages() -> None:
    for name in names():
        if name.startswith("recipes/"):
            assert stages(name), name
    assert [stage.name for stage in read_stages("recipes/mlr_beir", {})] == ["stage1"]
    assert read_stages("recipes/mvr_open_qa:bert", {})[0].mining is None
    first, second = read_stages("recipes/mlr_mined", {"train.batch_size": 32})
    assert (first.pools, second.pools, second.concat) == (("bm25",), ("stage1",), ("stage1",))
    assert (first.config.train.epochs, second.config.train.epochs) == (40.0, 20.0)
    assert first.config.train.batch_size == second.config.train.batch_size == 32
    assert second.mining == Settings(depth=100, keep=50, draw="top", positives_from_retrieval=True)
    _, both = read_stages("minilm:dual_encoder", {})
    assert (both.pools, both.config.data.negatives, both.config.head.name) == (("bm25", "stage1"), 1, "last_layer")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("[{}]", r"stage 1: it has name \(one of its own\)"),
        ("[{'name': 'a'}, {'name': 'a'}]", r"stage 2: it has name \(one of its own\)"),
        ("[{'name': 'a', 'train': 1}]", "and perhaps suffix, mine, config"),
        ("[{'name': 'a', 'mine': {'rank': 1}}]", "mine has no 'rank'; it has pools, concat, depth"),
        ("[{'name': 'a', 'mine': {'pools': ['b']}}]", "'b' is neither bm25 nor an earlier stage"),
        ("[{'name': 'a', 'mine': {'pools': ['bm25'], 'concat': ['bm25']}}]", "'bm25' is neither"),
        ("[{'name': 'a', 'mine': {'pools': ['bm25'], 'keep': 0}}]", "keep is 0"),
        ("[{'name': 'a', 'config': {'train.epoch': 1}}]", r"has no such key; did you mean train\.epochs"),
    ],
)
def test_stages_that_mean_nothing(written: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text(CONFIG.format(stages=written))
    with pytest.raises(ValueError, match=told):
        read_stages(str(tmp_path / "c.py"), {})


def test_a_config_without_stages() -> None:
    with pytest.raises(ValueError, match=r"has no function stages\(\)"):
        read_stages("mvr", {})


@pytest.fixture
def two(tmp_path: Path) -> Callable[..., list[Any]]:
    """A recipe of two stages in miniature."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    (tmp_path / "c.py").write_text(CONFIG.format(stages="two_stages(depth=20, keep=4)"))
    flags = [flag.removeprefix("--config.").partition("=") for flag in train_arguments(encoder, data, tmp_path)[2:]]
    given = {key: _value(value) for key, _, value in flags}
    on = Evaluated(str(data), str(data), str(data), "test", 10, ("RR@10",))

    def run(**changes: Any) -> list[Any]:
        keys = given | {key.replace("__", "."): value for key, value in changes.items()}
        run_recipe(read_stages(str(tmp_path / "c.py"), keys), tmp_path / "two", on, progress=False)
        return sorted((tmp_path / "two" / "done").glob("*.json"))

    return run


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


@pytest.mark.exhaustive
def test_two_stages_from_the_start_to_the_table(
    two: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = two(train__steps=2)
    steps = ["mine", "train", "encode", "search"]
    assert {path.stem for path in done} == {f"stage{n}.{step}" for n in (1, 2) for step in steps}
    table = (tmp_path / "two" / "results.md").read_text()
    assert "| stage1 |" in table
    assert "| stage2 |" in table
    records = {path.stem: read_sealed(path) for path in done}
    assert records["stage2.mine"]["made_from"]["pools"] == {"stage1": records["stage1.encode"]["files"]}
    for number in (1, 2):
        config = json.loads((tmp_path / "two" / f"stage{number}" / "config.json").read_text())
        assert config["data"]["train"] == str(tmp_path / "two" / "mined" / f"stage{number}.jsonl")
        assert config["train"]["start_from"] == "", "from the start again"
    mined = [read_examples(tmp_path / "two" / "mined" / f"stage{number}.jsonl") for number in (1, 2)]
    assert [e.negatives for e in mined[0]] != [e.negatives for e in mined[1]]
    capsys.readouterr()
    two(train__steps=2)
    assert capsys.readouterr().out.count("done already") == 8
    shutil.rmtree(tmp_path / "two" / "stage2" / "eval")
    two(train__steps=2)
    said = capsys.readouterr().out
    assert said.count("done already") == 7
    assert "== stage2.search: again, for its files changed" in said
    assert REPOSITORY.is_dir()
