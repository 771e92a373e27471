"""The thread that computes. It takes all items in the queue, and never waits for more items to fill a batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class QueueFullError(Exception):
    """The queue of a server is full: too many texts wait to be encoded."""


@dataclass(frozen=True)
class Operation:
    """A function of many items, `function(items, *arguments)`, that returns a result for each item. Items of different
    requests are computed together if their operations are equal."""

    function: Callable[..., list[Any]]
    arguments: tuple[Any, ...] = ()

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        return self.function(items, *self.arguments)


@dataclass(eq=False)
class _Work:
    """A request's items, and the results of the first ones."""

    operation: Operation
    items: Sequence[Any]
    future: Future[list[Any]] = field(default_factory=Future)
    results: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.items) - len(self.results)

    def finish(self, error: BaseException | None = None) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if error:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.results)


class DeviceThread:
    """A separate thread that computes the requests of all threads, one batch at a time.

    A batch has items of the oldest request and of all others with the same operation, in equal shares, so that a large
    request does not delay small ones. A request whose future is cancelled is dropped.
    """

    def __init__(self, batch: int, queue_limit: int) -> None:
        """Start the thread. batch: items computed at a time; queue_limit: items that may wait."""
        self._batch, self._queue_limit = batch, queue_limit
        self.report: Callable[[int], object] = lambda items: None  # called with the number of items of each batch
        self._queue: deque[_Work] = deque()
        self._change = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="device")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return sum(work.left for work in list(self._queue) if not work.future.cancelled())

    def submit(self, operation: Operation, items: Sequence[Any]) -> Future[list[Any]]:
        """Return a future of the result of each item. Raises QueueFullError if the queue is full; an empty queue takes
        any request."""
        work = _Work(operation, items)
        with self._change:
            if self._ending:
                raise QueueFullError("the server is shutting down")
            queue_length = self.waiting
            if queue_length and queue_length + len(items) > self._queue_limit:
                raise QueueFullError(
                    f"{queue_length} texts wait, and at most {self._queue_limit} may; try again in a moment"
                )
            self._queue.append(work)
            self._change.notify()
        return work.future

    def end(self) -> None:
        """End the thread after it has computed all items that wait."""
        with self._change:
            self._ending = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            operation = batch[0][0].operation
            self.report(sum(count for _, count in batch))
            try:
                results = operation([item for work, count in batch for item in _next(work, count)])
            except Exception as error:
                self._compute_apart(batch, error)
                continue
            for work, count in batch:
                work.results += results[:count]
                results = results[count:]
                if not work.left:
                    work.finish()

    def _take(self) -> list[tuple[_Work, int]]:
        """Wait for requests. Return (request, number of its items) for the next batch, or [] at the end."""
        with self._change:
            while True:
                self._queue = deque(work for work in self._queue if work.left and not work.future.cancelled())
                if self._queue:
                    break
                if self._ending:
                    return []
                self._change.wait()
            candidates = [work for work in self._queue if work.operation == self._queue[0].operation]
            free = self._batch
            batch: dict[_Work, int] = {}
            while free and any(batch.get(work, 0) < work.left for work in candidates):
                share = max(1, free // len(candidates))
                for work in candidates:
                    count_added = min(share, free, work.left - batch.get(work, 0))
                    batch[work] = batch.get(work, 0) + count_added
                    free -= count_added
            # The rest of this work waits behind the other work.
            for work in [work for work, count in batch.items() if count]:
                self._queue.remove(work)
                self._queue.append(work)
            return [(work, count) for work, count in batch.items() if count]

    def _compute_apart(self, batch: list[tuple[_Work, int]], error: Exception) -> None:
        """Compute the requests of a failed batch one by one, so that a bad request does not fail the other ones."""
        for work, count in batch:
            if len(batch) > 1:
                try:
                    work.results += work.operation(_next(work, count))
                except Exception as work_error:
                    self._drop(work, work_error)
                else:
                    if not work.left:
                        work.finish()
            else:
                self._drop(work, error)

    def _drop(self, work: _Work, error: Exception) -> None:
        with self._change:
            self._queue.remove(work)
        work.finish(error)


def _next(work: _Work, count: int) -> Sequence[Any]:
    return work.items[len(work.results) : len(work.results) + count]
