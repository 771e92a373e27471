"""Make batches and put them on the devices before the steps need them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import Any, Generic

import jax

from jaxret.types import BatchT

BATCHES_AHEAD = 2  # batches ahead of the step that the devices compute


class Prefetcher(Generic[BatchT]):
    """Calls `make(step)` for the steps from `start` to `stop` in a thread, in order, up to BATCHES_AHEAD steps ahead.

    A batch depends only on its step, so the thread changes no result. `take` raises the error that occurred when its
    batch was made. Leaving the block ends the thread after its current batch. `make` must not wait for other processes,
    because they may be at another step.
    """

    def __init__(self, make: Callable[[int], BatchT], start: int, stop: int) -> None:
        self._make, self._steps = make, range(start, stop)
        self._ready: deque[tuple[int, BatchT | None, BaseException | None]] = deque()
        self._change, self._closed = Condition(), False
        self._since, self._wait_seconds = time.perf_counter(), 0.0
        self._thread = Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher[BatchT]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def take(self, step: int, device_arrays: Any = None) -> BatchT:
        """Return the batch of a step. Each step is taken once, in order.

        If the batch is not ready when the devices have computed `device_arrays`, they are idle until it is;
        `wait_share` counts this time.
        """
        if not self._ready:
            jax.block_until_ready(device_arrays)
        begin = time.perf_counter()
        with self._change:
            self._change.wait_for(lambda: self._ready)
            number, batch, error = self._ready.popleft()
            self._change.notify_all()
        self._wait_seconds += time.perf_counter() - begin
        if error is not None:
            raise error
        if batch is None or number != step:
            raise AssertionError(f"the batch of step {step} was requested, but the next batch belongs to step {number}")
        return batch

    def wait_share(self) -> float:
        """Return the share of the time since the last call, 0 to 1, that the devices waited for a batch."""
        current_time = time.perf_counter()
        share = self._wait_seconds / max(current_time - self._since, 1e-9)
        self._since, self._wait_seconds = current_time, 0.0
        return min(share, 1.0)

    def _run(self) -> None:
        for step in self._steps:
            with self._change:
                self._change.wait_for(lambda: self._closed or len(self._ready) < BATCHES_AHEAD)
                if self._closed:
                    return
            batch, problem = None, None
            try:
                batch = self._make(step)
            except BaseException as error:  # `take` raises any error in the main thread
                problem = error
            with self._change:
                self._ready.append((step, batch, problem))
                self._change.notify_all()
            if problem is not None:
                return
