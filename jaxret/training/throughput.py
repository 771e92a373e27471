"""Throughput: steps, tokens and model FLOPs per second, as each line of a run's log has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxret.parallel.chips import find_chip
from jaxret.parallel.flops import count_flops, seconds_at_full_rate
from jaxret.parallel.mesh import Program
from jaxret.training.objective import Objective
from jaxret.training.step import make_train_step
from jaxret.types import TrainingBatch

# Measurements by the clock, in a log.
TIMED = ("seconds_per_step", "tokens_per_second", "padded_tokens_per_second", "mfu")


class ThroughputMeter:
    """Measures the steps since the last reading; the first reading includes compilation.

    Tokens are those of queries and passages on all devices; padded ones are all that the encoders compute. MFU is the
    part of the time that the model's products, forward and backward, take at the chips' full rate (Chowdhery et al.
    2022, appendix B); recomputation does not count.
    """

    def __init__(self, ideal: Callable[[TrainingBatch], float] | None = None, bins: int = 1) -> None:
        """Start the clock.

        Args:
            ideal: batch -> seconds that the products of its step take at the chips' full rate; None: unknown chips.
            bins: in how many parts the encoders compute a batch.
        """
        self._ideal, self._bins = ideal, bins
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far."""
        self._start, self._steps, self._padded_tokens, self._best = time.perf_counter(), 0, 0, 0.0
        self._real: list[jax.Array] = []  # still on the device: reading them would wait for the step

    def add(self, batch: TrainingBatch, real_tokens: jax.Array) -> None:
        """Count a step that was started."""
        self._steps += 1
        self._real.append(real_tokens)
        self._padded_tokens += sum(tokens.computed_tokens(self._bins) for tokens in batch.texts)
        if self._ideal:
            self._best += self._ideal(batch)

    def read(self) -> dict[str, float]:
        """Return TIMED, without mfu on unknown chips; waits for the steps, and restarts."""
        real = sum(float(tokens) for tokens in self._real)
        seconds = time.perf_counter() - self._start
        values = seconds / max(self._steps, 1), real / seconds, self._padded_tokens / seconds, self._best / seconds
        self.restart()
        return dict(zip(TIMED if self._ideal else TIMED[:-1], values))


def countable_step(step: Program, objective: Objective[Any, Any], *step_arguments: Any) -> Program:
    """Return the step of `make_train_step(objective, *step_arguments)` with plain attention, whose products can be
    counted: a kernel computes some of them twice, and cuDNN's shows none."""
    if objective.model.compute.attention == "plain":
        return step
    return make_train_step(replace(objective, model=objective.model.plain), *step_arguments)


def ideal_seconds(program: Program, state: Any, devices: int, kind: str) -> Callable[[TrainingBatch], float] | None:
    """Return the function batch -> seconds that the products of its step take at the chips' full rate. They are counted
    once for each shape of a batch, in the program's trace.

    Args:
        program: the training step.
        state: concrete or abstract.
        devices: chips that share a step.
        kind: of chip, as JAX names it; for an unknown one None is returned.
    """
    chip = find_chip(kind)
    if chip is None:
        return None
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    seconds_by_shape: dict[Any, float] = {}

    def seconds(batch: TrainingBatch) -> float:
        shape = jax.tree.structure(batch), *(leaf.shape for leaf in jax.tree.leaves(batch))
        if shape not in seconds_by_shape:
            counts = count_flops(program.trace(abstract, batch))
            products = {kind: count for kind, count in counts.items() if kind.phase != "recomputation"}
            seconds_by_shape[shape] = seconds_at_full_rate(products, chip) / devices
        return seconds_by_shape[shape]

    return seconds
