"""Between two steps: detect a broken loss, validate, and save a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jax

from jaxret.data.tokens.batches import Examples
from jaxret.models.partition import join_parameters
from jaxret.parallel.mesh import shard_whole_batch
from jaxret.storage.checkpoint import Checkpoints
from jaxret.training.diagnosis import SOUND, diagnose, not_finite
from jaxret.training.logging import MetricsLog
from jaxret.training.objective import Objective
from jaxret.training.task import TrainingPlan, Validator
from jaxret.training.train_state import TrainState, UpdateRule, checkpoint_trees
from jaxret.types import Log


class NotFiniteError(ArithmeticError):
    """A parameter, the loss or a gradient is NaN or infinite."""


def require_finite_parameters(state: TrainState, name: str) -> None:
    """Raise NotFiniteError if a parameter of the state, which the message calls `name`, holds a NaN or an infinity."""
    if bad := not_finite(join_parameters(state.params, state.frozen)):
        raise NotFiniteError(f"{name}: parameter {bad[0]} ({len(bad)} in all) holds a NaN or an infinity")


@dataclass
class Inspector:
    """Detects a loss that is not finite, and finds where it broke."""

    objective: Objective[Any, Any]  # computed anew for the batch that broke it
    plan: TrainingPlan[Any, Any]  # makes that batch
    data: Examples | None  # examples that are trained on
    dropout_key: jax.Array  # of the run
    checkpoints: Checkpoints  # of the run, for the message
    rule: UpdateRule  # how updates are made

    def require_healthy(self, state: TrainState) -> None:
        """Raise NotFiniteError with step, queries and cause if an update failed; the state is that before it."""
        if bool(state.healthy):
            return
        assert self.data is not None  # there was a step
        step, count = int(state.step), self.rule.accumulate
        for number in range(step * count, (step + 1) * count):  # until the first batch that breaks
            batch = shard_whole_batch(self.objective.mesh, self.plan.training_batch(self.data, number))
            key = jax.random.fold_in(self.dropout_key, number)
            params = join_parameters(state.params, state.frozen)
            cause = diagnose(self.objective.with_teacher(state.teacher), params, batch, key, number)
            if cause != SOUND:
                break
        self.checkpoints.wait()  # one that is being saved is good, too
        last = self.checkpoints.last()
        good = "There is no checkpoint yet" if last is None else f"The last checkpoint, of step {last}, is good"
        raise NotFiniteError(
            f"step {step + 1}: {cause}. The batch begins with {self.plan.describe_batch(self.data, number)}. {good}; "
            f"a lower optimizer.learning_rate or encoder.dtype=float32 may help{self._skipping(state)}"
        )

    def _skipping(self, state: TrainState) -> str:
        if state.skip_count is None or not self.rule.skip_nonfinite:
            return ", and train.skip_nonfinite=N goes on without up to N such steps"
        return f"; {int(state.skip_count)} step(s) were skipped before, as many as train.skip_nonfinite allows"


@dataclass(frozen=True)
class Criterion:
    """The metric that checkpoints are compared by: `metric`, and from step `then_from` on `then`, if it is set.

    MLR's and DPR's runs compare by NLL, and late by average rank. DPR and this class then discard the best so far;
    MLR's code continues to compare an average rank with an NLL (docs/training.md).
    """

    metric: str
    then: str = ""
    then_from: int = 0

    def at(self, step: int) -> str:
        return self.then if self.then and step >= self.then_from else self.metric


@dataclass
class Recorder:
    """Validates and saves."""

    checkpoints: Checkpoints
    metrics_log: MetricsLog  # of the run
    inspector: Inspector  # refuses to save a broken state
    validator: Validator | None  # parameters -> metrics; None without a dev set
    log: Log
    criterion: Criterion  # compares checkpoints
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation

    def save(self, state: TrainState, step: int, validate: bool) -> None:
        """Save a checkpoint of a state, with its metrics if `validate` is set and there is a dev set. Raises
        NotFiniteError for a broken state."""
        self.inspector.require_healthy(state)
        require_finite_parameters(state, f"step {step}")
        metrics, criterion, measured_on = None, None, ""
        if self.validator and validate:
            metrics = self.metrics = self.validator(state.weights)
            criterion = self.criterion.at(step)
            measured_on = self.validator.measured_on(criterion)
            self.metrics_log.write(step, metrics, "validation/")
            values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.log(f"step {step}: {values} ({datetime.now():%Y-%m-%d %H:%M:%S})")
        self.checkpoints.save(step, *checkpoint_trees(state, self.inspector.rule), metrics, criterion, measured_on)
