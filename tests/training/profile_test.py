"""train.profile: a trace of some steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.training.loop import train
from jaxret.training.profile import check_profile
from tests.pipeline import tiny_config, write_data, write_encoder


@pytest.mark.slow
def test_a_window_of_steps_is_traced(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    for name, steps in (("traced", (2, 3)), ("plain", ())):
        keys = {"data__dev": "", "train__steps": 4, "train__profile": steps}
        config = tiny_config(tmp_path / "encoder", tmp_path / "data", **keys)
        train(config, tmp_path / name, progress=False)
    (trace,) = (tmp_path / "traced" / "profile").rglob("*.xplane.pb")
    assert b"train_step" in trace.read_bytes()
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.parametrize("steps", [(3,), (0, 2), (3, 2), (1, 2, 3)])
def test_other_windows_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"train\.profile is"):
        check_profile(steps)
