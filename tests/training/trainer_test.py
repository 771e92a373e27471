"""The batches of each step, and the steps at which a run validates and saves: a trainer whose steps compute nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from jaxret.parallel.mesh import make_mesh
from jaxret.runs.workdir import Workdir
from jaxret.training.loop import Optimization, RunLength, Trainer
from jaxret.training.train_state import TrainState
from jaxret.types import Tokens

TOTAL, EVERY = 7, 3


@struct.dataclass
class Numbers:
    """A batch that consists of its number, or of several numbers, one per row."""

    numbers: Any

    @property
    def texts(self) -> tuple[Tokens, ...]:
        return ()

    @property
    def size(self) -> int:
        return len(self.numbers)


class Recorded:
    """A trainer that records the batches of its steps, and the steps that are saved and validated."""

    def __init__(self, folder: Path, accumulate: int = 1, stop_in: int = -1, skipped: int | None = None) -> None:
        self.batches: list[list[int]] = []  # numbers of the batches of each step
        self.saves: list[tuple[int, bool]] = []  # (step, whether it is validated)
        self.logged: list[int] = []
        self.stop_in, count = stop_in, None if skipped is None else jnp.int32(skipped)
        self.state = TrainState({}, (), jnp.int32(0), jnp.array(True), None, count)
        train = SimpleNamespace(log_every=2, profile=(), accumulate=accumulate)
        nothing = SimpleNamespace(poll=lambda together: None, require_healthy=lambda state: None)
        job = SimpleNamespace(config=SimpleNamespace(train=train), progress=False, workdir=Workdir(folder))
        job.mesh = make_mesh(devices=jax.devices()[:1])
        log = SimpleNamespace(write=lambda step, metrics: self.logged.append(step))
        recorder = SimpleNamespace(checkpoints=nothing, inspector=nothing, save=self.save, metrics_log=log)
        plan = SimpleNamespace(training_batch=lambda data, number, part: Numbers(np.full(4, number)))
        meter = SimpleNamespace(restart=lambda: None, add=lambda batch, tokens: None, read=dict)
        length = RunLength(TOTAL, EVERY, epochs_per_batch=0.1, first=0, planned_steps=TOTAL)
        optimization = Optimization(length, optax.identity(), lambda step: 100.0 - step)
        self.trainer = object.__new__(Trainer)  # the constructor would check types of fields, and these are stand-ins
        vars(self.trainer).update(job=job, optimization=optimization, data=SimpleNamespace(pad_id=0), plan=plan)
        vars(self.trainer).update(train_step=self.step, recorder=recorder, meter=meter)

    def step(self, state: Any, batch: Numbers) -> tuple[Any, dict[str, Any]]:
        self.batches.append(np.asarray(batch.numbers).reshape(-1, 4)[:, 0].tolist())
        if len(self.batches) == self.stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return state, {"loss": 1.0, "real_tokens": 4}

    def save(self, state: Any, step: int, validate: bool) -> None:
        self.saves.append((step, validate))

    def run(self, start: int | None = None) -> int:
        return self.trainer.run(self.state, start)


@pytest.mark.parametrize(("accumulate", "first", "last"), [(1, [0], [6]), (3, [0, 1, 2], [18, 19, 20])])
def test_every_step_has_batches_of_its_own(accumulate: int, first: list[int], last: list[int], tmp_path: Path) -> None:
    whole = Recorded(tmp_path, accumulate)
    assert whole.run() == TOTAL
    assert (whole.batches[0], whole.batches[-1]) == (first, last)
    assert [number for step in whole.batches for number in step] == list(range(TOTAL * accumulate))
    resumed = Recorded(tmp_path, accumulate)
    assert resumed.run(start=3) == TOTAL
    assert resumed.batches == whole.batches[3:], "a restart continues with the next data"


def test_checkpoints_are_saved_and_validated_where_they_are_due(tmp_path: Path) -> None:
    trainer = Recorded(tmp_path)
    trainer.run()
    assert trainer.saves == [(3, True), (6, True), (7, True)]
    assert trainer.logged == [2, 4, 6, 7]


@pytest.mark.parametrize(("step", "validated"), [(4, False), (6, True)])
def test_sigterm_saves_the_step_and_validates_only_what_is_due(step: int, validated: bool, tmp_path: Path) -> None:
    """A validation that is not due would take time, and could change the best checkpoint."""
    trainer = Recorded(tmp_path, stop_in=step)
    assert trainer.run() == step
    assert trainer.saves == [(3, True), (step, validated)]


def test_skipped_updates_do_not_count_for_the_learning_rate(tmp_path: Path) -> None:
    rates = [Recorded(tmp_path, skipped=skipped) for skipped in (None, 0, 2)]
    assert [one.trainer.rate(one.state, 5)["learning_rate"] for one in rates] == [96, 96, 98]
    assert rates[2].trainer.rate(rates[2].state, 1) == {"learning_rate": 100, "skipped_steps": 2}
