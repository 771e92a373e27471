"""Batches that are on the devices before the step asks for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from types import TracebackType
from typing import Any

import jax

from jaxret.types import AnyBatch

DEPTH = 2  # batches ahead of the step that the devices compute


class Feed:
    """`make(step)` for the steps from `start` to `stop`, called by a thread up to DEPTH steps ahead, in order.

    What a step gets depends on nothing but the step: how far the thread is changes only when it is there. An error is
    raised where its batch is taken, as it is. Leaving the block ends the thread, once the batch it is at is made.
    `make` must not wait for other processes: they may be at another step.
    """

    def __init__(self, make: Callable[[int], AnyBatch], start: int, stop: int) -> None:
        self._make, self._steps = make, range(start, stop)
        self._ready: deque[tuple[int, AnyBatch | None, BaseException | None]] = deque()
        self._changed, self._closed = Condition(), False
        self._since, self._waited = time.perf_counter(), 0.0
        self._thread = Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def take(self, step: int, running: Any = None) -> AnyBatch:
        """The batch of a step; steps are taken in order, each once. `running` is what the devices compute: if the batch
        is not there, the devices wait for it from when they are done with that, and this is what `waited` counts."""
        if not self._ready:
            jax.block_until_ready(running)
        begin = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            made, batch, error = self._ready.popleft()
            self._changed.notify_all()
        self._waited += time.perf_counter() - begin
        if error is not None:
            raise error
        if batch is None or made != step:
            raise AssertionError(f"the batch of step {step} was asked for, and that of step {made} is next")
        return batch

    def waited(self) -> float:
        """Share of the time since this was last asked that the devices waited for a batch, 0 to 1."""
        now = time.perf_counter()
        share = self._waited / max(now - self._since, 1e-9)
        self._since, self._waited = now, 0.0
        return min(share, 1.0)

    def _run(self) -> None:
        for step in self._steps:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < DEPTH)
                if self._closed:
                    return
            batch, problem = None, None
            try:
                batch = self._make(step)
            except BaseException as error:  # whatever it is: the step that needs the batch raises it
                problem = error
            with self._changed:
                self._ready.append((step, batch, problem))
                self._changed.notify_all()
            if problem is not None:
                return
