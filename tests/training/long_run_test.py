"""A long training holds no more resources at its end than at its beginning."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from jaxret.parallel.mesh import Program
from jaxret.training import step as step_module
from jaxret.training.loop import train
from tests.pipeline import resources, tiny_config, write_data, write_encoder


@pytest.mark.daily("few")
@pytest.mark.slow
@pytest.mark.faults(31)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("steps", "keeps", "more"),
    [
        (20, False, {"encoder__layers": 1}),
        (100, False, {}),
        pytest.param(100, True, {}, marks=pytest.mark.exhaustive),
        pytest.param(5000, False, {}, marks=pytest.mark.exhaustive),
    ],
    ids=["few", "100", "kept", "5000"],
)
def test_steps_leak_no_resources(steps: int, keeps: bool, more: dict[str, Any], tmp_path: Path) -> None:
    """Compare open files, threads and memory after the first fifth of the steps and at the end. Control: a callback
    that keeps files and memory is noticed."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    seen: list[tuple[int, int, int]] = []
    kept: list[Any] = []

    def look(step: int, metrics: dict[str, Any]) -> None:
        seen.append(resources())
        if keeps:
            kept.extend([socket.socket(), bytearray(b"x" * 10 * 2**20)])

    saves = {"train__log_every": steps // 10, "train__checkpoint_every": steps, "data__dev": ""}
    config = tiny_config(tmp_path / "encoder", tmp_path / "data", train__steps=steps, **saves, **more)
    train(config, tmp_path / "run", progress=False, callback=look)
    early, late = seen[2], seen[-1]
    assert len(seen) == 10
    assert (late[0] > early[0] + 2) == keeps
    assert late[1] <= early[1] + 2
    assert (late[2] - early[2] > 32 * 2**20) == keeps
    for number, one in enumerate(kept):
        if number % 2 == 0:
            one.close()


@pytest.mark.slow
def test_at_most_two_steps_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is hundreds of steps ahead would hold hundreds of batches, and XLA's eight CPU devices would
    deadlock."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    unfinished: list[int] = []
    losses: list[Any] = []  # jax.Array; its type has no is_ready

    class Counted(Program):
        def __call__(self, *arguments: Any) -> Any:
            unfinished.append(sum(not loss.is_ready() for loss in losses))
            state, values = super().__call__(*arguments)
            losses.append(values["loss"])
            return state, values

    monkeypatch.setattr(step_module, "Program", Counted)
    saves = {"train__log_every": 40, "train__checkpoint_every": 40, "data__dev": ""}
    config = tiny_config(tmp_path / "encoder", tmp_path / "data", train__steps=40, **saves)
    train(config, tmp_path / "run", progress=False)
    assert len(unfinished) == 40
    assert max(unfinished) <= 1
