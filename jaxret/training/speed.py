"""How fast a run is: what every line of its log says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxret.chips import chip_of
from jaxret.distributed import Program
from jaxret.flops import at_full_rate, count
from jaxret.training.objective import Objective
from jaxret.training.step import make_train_step
from jaxret.types import AnyBatch

TIMED = ("seconds_per_step", "tokens_per_second", "padded_tokens_per_second", "mfu")  # what a clock says, in a log


class Speed:
    """Measures the steps since the last reading.

    ideal: seconds that the products of a step would take on these chips, or None where they are not known. Tokens are
    those of queries and passages on all devices, padded ones all that the encoders compute, of batches that they
    compute in `bins` parts. MFU is the part of the time that the model's products, forward and backward, take at the
    chips' full rate (Chowdhery et al. 2022, appendix B); what is computed again does not count. The first reading has
    the compilation in it.
    """

    def __init__(self, ideal: Callable[[AnyBatch], float] | None = None, bins: int = 1) -> None:
        self._ideal, self._bins = ideal, bins
        self.restart()

    def restart(self) -> None:
        self._start, self._steps, self._padded, self._best = time.perf_counter(), 0, 0, 0.0
        self._real: list[jax.Array] = []  # still on the device: asking for them would wait for the step

    def add(self, batch: AnyBatch, real_tokens: jax.Array) -> None:
        """A step that was started."""
        self._steps += 1
        self._real.append(real_tokens)
        self._padded += sum(tokens.computed(self._bins) for tokens in batch.texts)
        if self._ideal:
            self._best += self._ideal(batch)

    def read(self) -> dict[str, float]:
        """TIMED, mfu only where the chips are known; waits for the steps, and starts again."""
        real = sum(float(tokens) for tokens in self._real)
        seconds = time.perf_counter() - self._start
        values = seconds / max(self._steps, 1), real / seconds, self._padded / seconds, self._best / seconds
        self.restart()
        return dict(zip(TIMED if self._ideal else TIMED[:-1], values))


def counted_step(step: Program, objective: Objective, *rest: Any) -> Program:
    """The step whose products are counted, of `make_train_step(objective, *rest)`: with plain attention, because a
    kernel computes some of them twice, and cuDNN's shows none."""
    if objective.model.compute.attention == "plain":
        return step
    return make_train_step(replace(objective, model=objective.model.plain), *rest)


def ideal_seconds(program: Program, state: Any, devices: int, kind: str) -> Callable[[AnyBatch], float] | None:
    """Batch -> seconds that the products of a step of the program take at the full rate of so many chips; None if chips
    of this kind are not known. Counted once for each shape, from the trace that there is."""
    chip = chip_of(kind)
    if chip is None:
        return None
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    known: dict[Any, float] = {}

    def seconds(batch: AnyBatch) -> float:
        shape = jax.tree.structure(batch), *(leaf.shape for leaf in jax.tree.leaves(batch))
        if shape not in known:
            products = {
                kind: n for kind, n in count(program.trace(abstract, batch)).items() if kind.phase != "recomputation"
            }
            known[shape] = at_full_rate(products, chip) / devices
        return known[shape]

    return seconds
