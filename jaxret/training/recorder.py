"""Between two steps: is the run sound, is it better, and is it saved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import jax

from jaxret.checkpoint import Checkpoints
from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.distributed import place_rows
from jaxret.training.begin import Say
from jaxret.training.diagnosis import diagnose, not_finite
from jaxret.training.logging import MetricsLog
from jaxret.training.step import Objective, TrainState
from jaxret.training.validation import Validation


class NotFiniteError(ArithmeticError):
    """A parameter, the loss or a gradient is NaN or infinite."""


def require_finite(state: TrainState, what: str) -> None:
    """Raises NotFiniteError naming the first parameter that holds a NaN or an infinity."""
    if bad := not_finite(state.params):
        raise NotFiniteError(f"{what}: parameter {bad[0]} ({len(bad)} in all) holds a NaN or an infinity")


@dataclass
class Inspector:
    """Notices a loss that broke, and looks for the place."""

    objective: Objective
    plan: BatchPlan
    data: TrainingSet | None
    dropout_key: jax.Array
    checkpoints: Checkpoints

    def require_healthy(self, state: TrainState) -> None:
        """Raises NotFiniteError naming step, queries and place if an update failed; the state is that before it."""
        if bool(state.healthy):
            return
        assert self.data is not None  # there was a step
        step = int(state.step)
        batch = self.plan.training_batch(self.data, step)
        key = jax.random.fold_in(self.dropout_key, step)
        batch = place_rows(self.objective.mesh, batch)
        where = diagnose(self.objective, state.params, batch, key, state.step)
        queries = ", ".join(self.data.query_ids[i] for i in self.plan.examples_of(step, len(self.data))[:8])
        last = self.checkpoints.last()
        good = "There is no checkpoint yet" if last is None else f"The last checkpoint, of step {last}, is good"
        raise NotFiniteError(
            f"step {step + 1}: {where}. The batch begins with queries {queries}. {good}; "
            f"a lower optimizer.learning_rate or encoder.dtype=float32 may help"
        )


@dataclass
class Recorder:
    """Validates and saves."""

    checkpoints: Checkpoints
    log: MetricsLog
    inspector: Inspector
    validate: Validation | None
    say: Say
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation

    def save(self, state: TrainState, step: int, validate: bool) -> None:
        """A checkpoint of `state`, never of a broken one; with validation, if asked and there is a dev set."""
        self.inspector.require_healthy(state)
        require_finite(state, f"step {step}")
        metrics = None
        if self.validate and validate:
            metrics = self.metrics = self.validate(state.params)
            self.log.write(step, self.metrics, "validation/")
            self.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items()))
        progress = {"opt_state": state.opt_state, "step": state.step, "healthy": state.healthy}
        self.checkpoints.save(step, state.params, progress, metrics)


class Stopwatch:
    """Seconds per step since the last reading."""

    def __init__(self, step: int) -> None:
        self._time, self._step = time.perf_counter(), step

    def per_step(self, step: int) -> float:
        seconds = (time.perf_counter() - self._time) / max(step - self._step, 1)
        self._time, self._step = time.perf_counter(), step
        return seconds
