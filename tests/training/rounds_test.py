"""Rounds: each run continues the training of the run before. On the same data, they equal one run, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxret.data.formats import TrainingSource
from jaxret.data.tokens.batches import tokenize_examples
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json
from jaxret.storage.checkpoint import CheckpointError
from jaxret.training.loop import schedule_steps, train
from tests.pipeline import tiny_config, write_data, write_encoder
from tests.training.loop_test import final_state, interrupt, lines

pytestmark = pytest.mark.slow

# Two checkpoints per round of 48 examples, and rounds that are not a whole number of epochs.
SETTINGS: dict[str, Any] = {
    "train__checkpoint_every": 2,
    "optimizer__ema": 0.9,
    "optimizer__warmup_fraction": 0.25,
    "data__dev": "",
    "validation__best": "last",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with encoder/ and data/; one/: 8 steps; round-1/ and round-2/: 4 steps each."""
    folder = tmp_path_factory.mktemp("rounds")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    train(config_of(folder, train__steps=8), folder / "one", progress=False)
    for number in (1, 2):
        train(round_config(folder, number), folder / f"round-{number}", progress=False)
    return folder


def config_of(root: Path, **overrides: Any) -> ConfigDict:
    return tiny_config(root / "encoder", root / "data", **{**SETTINGS, **overrides})


def round_config(root: Path, number: int, **overrides: Any) -> ConfigDict:
    start = {"train__start_from": str(root / f"round-{number - 1}")} if number > 1 else {}
    return config_of(root, train__steps=4, train__round=number, train__rounds=2, **start, **overrides)


def test_two_rounds_equal_one_run(root: Path) -> None:
    """Parameters, optimizer, moving average and step are equal at the end; the order of the data, dropout and learning
    rates on the way."""
    one = final_state(root / "one", config_of(root), 8)
    assert final_state(root / "round-2", round_config(root, 2), 8) == one
    assert final_state(root / "round-1", round_config(root, 1), 4) != one, "control: one round ends in another state"
    assert lines(root / "round-1") + lines(root / "round-2") == lines(root / "one")
    rates = [line["learning_rate"] for line in lines(root / "one")]
    assert rates[4] > rates[5] > rates[7] > 0, "all rounds share one schedule"


def test_control_starting_from_parameters_only_differs(root: Path, tmp_path: Path) -> None:
    """Without rounds, the optimizer starts from zero, and steps count from 0."""
    config = config_of(root, train__steps=4, train__start_from=str(root / "round-1"))
    train(config, tmp_path / "run", progress=False)
    assert lines(tmp_path / "run")[0]["step"] == 1
    cut = config_of(root, train__steps=0, train__start_from=str(root / "round-1"), encode__dimension=4)
    train(cut, tmp_path / "cut", progress=False)
    assert open_run(tmp_path / "cut").model.dimension == 4, "training uses whole vectors"
    other, one = final_state(tmp_path / "run", config, 4), final_state(root / "one", config_of(root), 8)
    assert not any(other[name] == one[name] for name in one if name.startswith("ema/") and "kernel" in name)


def test_the_record_of_a_round(root: Path) -> None:
    start = read_json(root / "round-2" / "data.json")["start"]
    assert start == open_run(root / "round-1").checkpoint
    assert start["step"] == 4
    assert open_run(root / "round-2").checkpoint["step"] == 8


@pytest.mark.parametrize("at", [5, 7])
def test_a_round_is_resumed(at: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is interrupted before its first checkpoint, or after it."""
    config = round_config(root, 2)
    with monkeypatch.context() as patch:
        interrupt(patch, at, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False)
    result = train(config, tmp_path / "run", progress=False)
    assert (result.resumed_from, result.step) == (None if at == 5 else 6, 8)
    assert final_state(tmp_path / "run", config, 8) == final_state(root / "round-2", config, 8)
    assert lines(tmp_path / "run") == lines(root / "round-2")
    assert train(config, tmp_path / "run", progress=False).resumed_from == 8, "the run is complete"


def test_a_round_of_zero_steps_passes_the_state_on(root: Path, tmp_path: Path) -> None:
    config = config_of(root, train__steps=0, train__round=3, train__rounds=3)
    config.train.start_from = str(root / "round-2")
    config.encode.dimension = 4
    train(config, tmp_path / "run", progress=False)
    assert final_state(tmp_path / "run", config, 8) == final_state(root / "round-2", round_config(root, 2), 8)


def test_steps_of_each_round(root: Path) -> None:
    """Epochs are counted in a round's own data; future rounds are assumed to be as long as this one."""
    examples = tokenize_examples(
        TrainingSource.open(root / "data", "train").read(), TextTokenizer.load(root / "encoder", 12, 24)
    )
    assert len(examples) == 48
    epochs = config_of(root, train__steps=-1, train__epochs=1.5, train__rounds=4)
    lengths = []
    for number, first in ((1, 0), (2, 9), (4, 30)):
        epochs.train.round = number
        length = schedule_steps(epochs, examples, first)
        lengths.append((length.first, length.total, length.planned_steps))
    assert lengths == [(0, 9, 36), (9, 18, 36), (30, 39, 39)]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"train__start_from": ""}, ValueError, "train.round is 2, but train.start_from is empty"),
        ({"train__rounds": 1}, ValueError, r"train.round .*2; .*train.rounds, 1"),
        ({"train__round": 0}, ValueError, r"train.round .*0; .*least 1"),
        ({"train__start_from": "nowhere"}, FileNotFoundError, "nowhere is not a run"),
        ({"normalize": True}, ContractError, r"(?s)normalize: .*train.start_from .*encoder"),
        ({"optimizer__ema": 0.0}, CheckpointError, "round-1.*does not fit the config"),
    ],
)
def test_invalid_rounds_are_errors(overrides: Any, error: Any, message: str, root: Path, tmp_path: Path) -> None:
    config = round_config(root, 2)
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    with pytest.raises(error, match=message):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.json").exists()
