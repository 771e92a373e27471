"""Trace the steps of train.profile, for XProf and Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax


def check_profile(steps: Sequence[int]) -> None:
    """Raise ValueError unless train.profile is empty or has two ascending steps."""
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise ValueError(f"train.profile is {tuple(steps)}; it must be (), or the first and the last step to trace")


class Profiler:
    """Traces the steps of a range into a folder, in every process. A run that resumes inside the range traces its
    remaining steps."""

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        """Prepare to trace into `folder`. `steps` has the first and the last step, or is empty to trace nothing."""
        self._folder = folder
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._runs = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, step: int, state: Any) -> None:
        """Start the trace before a step of the range, after the devices have computed `state`."""
        if step in self._steps and not self._runs:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._runs = True

    def end(self, step: int, state: Any) -> None:
        """Stop the trace after the last step of the range, when the devices have computed `state`."""
        if self._runs and step + 1 not in self._steps:
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
