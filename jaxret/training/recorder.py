"""The work between two steps: detect a loss that is not finite, validate, and save a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jax

from jaxret.data.tokens.batches import Examples
from jaxret.models.partition import join_parameters
from jaxret.parallel.mesh import shard_whole_batch
from jaxret.storage.checkpoint import Checkpoints
from jaxret.training.diagnosis import SOUND, NotFiniteError, diagnose, not_finite
from jaxret.training.logging import MetricsLog
from jaxret.training.objective import Objective
from jaxret.training.task import TrainingPlan, Validator
from jaxret.training.train_state import TrainState, UpdateRule, checkpoint_trees
from jaxret.types import Log


def require_finite_parameters(state: TrainState, name: str) -> None:
    """Raise NotFiniteError if a parameter of a state contains a NaN or an infinity. `name` is the state in the
    error."""
    if bad := not_finite(join_parameters(state.params, state.frozen)):
        raise NotFiniteError(f"{name}: parameter {bad[0]} ({len(bad)} in all) contains a NaN or an infinity")


def require_finite_metrics(metrics: Mapping[str, float], step: int) -> None:
    """Raise NotFiniteError for a metric of a validation that is NaN or infinite: it could not rank checkpoints."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NotFiniteError(
                f"step {step}: {name} of the validation is {value}, though the parameters are finite: scores of dev "
                "queries are too large. A lower optimizer.learning_rate, a higher loss.temperature or "
                "encoder.dtype=float32 may help"
            )


@dataclass
class Inspector:
    """Detects a loss that is not finite, and finds the first value that is not."""

    objective: Objective[Any, Any]  # computed again for the batches of the failed update
    plan: TrainingPlan[Any, Any]  # makes these batches again
    data: Examples | None  # training examples; None if there are no steps
    dropout_key: jax.Array  # key of the run's dropout
    checkpoints: Checkpoints  # checkpoints of the run, which the error names
    rule: UpdateRule  # how updates are made

    def require_healthy(self, state: TrainState) -> None:
        """Raise NotFiniteError with step, queries and cause if an update failed. `state` is the state before it."""
        if bool(state.healthy):
            return
        assert self.data is not None  # a step was made
        step, count = int(state.step), self.rule.accumulate
        for number in range(step * count, (step + 1) * count):  # ends at the first batch that is not finite
            batch = shard_whole_batch(self.objective.mesh, self.plan.training_batch(self.data, number))
            key = jax.random.fold_in(self.dropout_key, number)
            params = join_parameters(state.params, state.frozen)
            cause = diagnose(self.objective.with_teacher(state.teacher), params, batch, key, number)
            if cause != SOUND:
                break
        self.checkpoints.wait()  # a checkpoint that is still being saved is good and counts as the last
        last = self.checkpoints.last()
        good = "There is no checkpoint yet" if last is None else f"The last checkpoint, of step {last}, is good"
        raise NotFiniteError(
            f"step {step + 1}: {cause}. The batch begins with {self.plan.describe_batch(self.data, number)}. {good}; "
            f"a lower optimizer.learning_rate or encoder.dtype=float32 may help{self._skipping(state)}"
        )

    def _skipping(self, state: TrainState) -> str:
        if state.skip_count is None or not self.rule.skip_nonfinite:
            return ", and train.skip_nonfinite=N skips up to N such steps"
        return f"; {int(state.skip_count)} step(s) were already skipped, as many as train.skip_nonfinite allows"


@dataclass(frozen=True)
class Criterion:
    """The metric that compares checkpoints: `metric`, and from step `then_from` on `then_metric`, if it is set.

    MLR's and DPR's runs compare by NLL and, late in training, by average rank. At the change, DPR and this class
    discard the best checkpoint so far; MLR's code compares an average rank with an NLL (docs/training.md).
    """

    metric: str
    then_metric: str = ""
    then_from: int = 0  # number of a step

    def at(self, step: int) -> str:
        """Return the name of the metric at a step."""
        return self.then_metric if self.then_metric and step >= self.then_from else self.metric


@dataclass
class Recorder:
    """Validates a state, and saves a checkpoint of it."""

    checkpoints: Checkpoints  # checkpoints of the run
    metrics_log: MetricsLog  # logs of the run
    inspector: Inspector  # raises for a state that is not finite
    validator: Validator | None  # parameters -> metrics; None without a dev set
    log: Log  # prints a line
    criterion: Criterion  # compares checkpoints
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last validation

    def save(self, state: TrainState, step: int, validate: bool) -> None:
        """Save a checkpoint of a state, with metrics if `validate` is set and there is a dev set. Raises NotFiniteError
        for a state or a metric that is not finite."""
        self.inspector.require_healthy(state)
        require_finite_parameters(state, f"step {step}")
        metrics, criterion, measured_on = None, None, ""
        if self.validator and validate:
            metrics = self.metrics = self.validator(state.weights)
            require_finite_metrics(metrics, step)
            criterion = self.criterion.at(step)
            measured_on = self.validator.measured_on(criterion)
            self.metrics_log.write(step, metrics, "validation/")
            values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.log(f"step {step}: {values} ({datetime.now():%Y-%m-%d %H:%M:%S})")
        self.checkpoints.save(step, *checkpoint_trees(state, self.inspector.rule), metrics, criterion, measured_on)
