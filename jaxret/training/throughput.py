"""Measure steps, tokens and model FLOPs per second for the lines of a run's log."""

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

# Names of the measurements in a log that depend on the clock.
TIMED = ("seconds_per_step", "tokens_per_second", "padded_tokens_per_second", "mfu")


class ThroughputMeter:
    """Measures the steps since the last reading. The first reading includes compilation.

    Tokens are counted over queries and passages on all devices; padded tokens are all tokens that encoders compute. MFU
    is the time that the model's products, forward and backward, take at the chips' full rate, as a fraction of the
    measured time (Chowdhery et al. 2022, appendix B). Recomputation does not count.
    """

    def __init__(self, ideal: Callable[[TrainingBatch], float] | None = None, bins: int = 1) -> None:
        """Start the clock.

        Args:
            ideal: batch -> seconds that the products of its step take at the chips' full rate; None: unknown chips.
            bins: number of separately encoded parts of a batch.
        """
        self._ideal, self._bins = ideal, bins
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far."""
        self._start, self._steps, self._padded_tokens, self._best = time.perf_counter(), 0, 0, 0.0
        self._real: list[jax.Array] = []  # kept on the device, because reading a value would wait for its step

    def add(self, batch: TrainingBatch, real_tokens: jax.Array) -> None:
        """Count a step that was started."""
        self._steps += 1
        self._real.append(real_tokens)
        self._padded_tokens += sum(tokens.computed_tokens(self._bins) for tokens in batch.texts)
        if self._ideal:
            self._best += self._ideal(batch)

    def read(self) -> dict[str, float]:
        """Return the measurements named in TIMED since the last reading (without mfu on unknown chips). Wait for the
        steps, and restart."""
        real = sum(float(tokens) for tokens in self._real)
        seconds = time.perf_counter() - self._start
        values = seconds / max(self._steps, 1), real / seconds, self._padded_tokens / seconds, self._best / seconds
        self.restart()
        return dict(zip(TIMED if self._ideal else TIMED[:-1], values))


def countable_step(step: Program, objective: Objective[Any, Any], *step_arguments: Any) -> Program:
    """Return the step of `make_train_step(objective, *step_arguments)` with plain attention, for counting its products.
    A kernel computes some products twice, and cuDNN's kernel shows none."""
    if objective.model.compute.attention == "plain":
        return step
    return make_train_step(replace(objective, model=objective.model.plain), *step_arguments)


def ideal_seconds(program: Program, state: Any, devices: int, kind: str) -> Callable[[TrainingBatch], float] | None:
    """Return a function: batch -> seconds that the products of its step take at the chips' full rate. The products are
    counted in the program's trace, once for each shape of a batch. Return None for an unknown chip.

    Args:
        program: the training step.
        state: concrete or abstract state.
        devices: number of chips that share a step.
        kind: JAX's name of the chip.
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
