"""Between two steps: is the run sound, is it better, and is it saved."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from jaxret.checkpoint import Checkpoints
from jaxret.data.batches import AnyExamples
from jaxret.distributed import place_rows
from jaxret.training.begin import Say
from jaxret.training.diagnosis import SOUND, diagnose, not_finite
from jaxret.training.logging import MetricsLog
from jaxret.training.objective import Objective
from jaxret.training.state import saved
from jaxret.training.step import Rule, TrainState
from jaxret.training.task import Plan, Validate


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
    plan: Plan
    data: AnyExamples | None
    dropout_key: jax.Array
    checkpoints: Checkpoints
    rule: Rule

    def require_healthy(self, state: TrainState) -> None:
        """Raises NotFiniteError naming step, queries and place if an update failed; the state is that before it."""
        if bool(state.healthy):
            return
        assert self.data is not None  # there was a step
        step, count = int(state.step), self.rule.accumulate
        for number in range(step * count, (step + 1) * count):  # the first batch of the update that is to blame
            batch = place_rows(self.objective.mesh, self.plan.training_batch(self.data, number))
            key = jax.random.fold_in(self.dropout_key, number)
            where = diagnose(self.objective, state.params, batch, key, number)
            if where != SOUND:
                break
        last = self.checkpoints.last()
        good = "There is no checkpoint yet" if last is None else f"The last checkpoint, of step {last}, is good"
        raise NotFiniteError(
            f"step {step + 1}: {where}. The batch begins with {self.plan.named(self.data, number)}. {good}; "
            f"a lower optimizer.learning_rate or encoder.dtype=float32 may help{self._skipping(state)}"
        )

    def _skipping(self, state: TrainState) -> str:
        if state.skipped is None or not self.rule.skip_nonfinite:
            return ", and train.skip_nonfinite=N goes on without up to N such steps"
        return f"; {int(state.skipped)} step(s) were skipped before, as many as train.skip_nonfinite allows"


@dataclass(frozen=True)
class Criterion:
    """By which metric a checkpoint is compared: `metric`, and from a number of steps on another, if there is one.

    So MLR's and DPR's runs chose: by NLL, late by average rank. DPR then forgets the best so far, as is done here;
    MLR's code goes on comparing, an average rank with an NLL (docs/training.md).
    """

    metric: str
    then: str = ""
    then_from: int = 0  # steps

    def at(self, step: int) -> str:
        return self.then if self.then and step >= self.then_from else self.metric


@dataclass
class Recorder:
    """Validates and saves."""

    checkpoints: Checkpoints
    log: MetricsLog
    inspector: Inspector
    validate: Validate | None
    say: Say
    criterion: Criterion
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation

    def save(self, state: TrainState, step: int, validate: bool) -> None:
        """A checkpoint of `state`, never of a broken one; with validation, if asked and there is a dev set."""
        self.inspector.require_healthy(state)
        require_finite(state, f"step {step}")
        metrics = criterion = None
        if self.validate and validate:
            metrics = self.metrics = self.validate(state.weights)
            criterion = self.criterion.at(step)
            self.log.write(step, self.metrics, "validation/")
            self.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items()))
        self.checkpoints.save(step, *saved(state), metrics, criterion)
